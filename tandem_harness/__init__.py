"""verifiers finds a harness by the name of an installed top-level module: this is that name for ours."""

from orchestrator.envs.verifiers.drivers import GatewayHarness

__all__ = ["GatewayHarness"]
