from tests.orchestrator.edge.conftest import env_modules, tokenizer

__all__ = ["env_modules", "tokenizer"]
