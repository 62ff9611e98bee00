"""Cannot be imported."""

raise RuntimeError("this module is broken")
