"""verifiers finds a harness by the name of an installed top-level module: this is that name for ours."""

from orchestrator.envs.verifiers_adapter import GatewayHarness

__all__ = ["GatewayHarness"]
