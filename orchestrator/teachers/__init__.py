"""Frozen models that the policy imitates (`sft`) or is pulled towards (`opd`)."""
