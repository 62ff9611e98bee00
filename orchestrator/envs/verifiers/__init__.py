"""verifiers 0.4.0 environments behind `EnvAdapter`. Only this package imports verifiers; import it late."""
