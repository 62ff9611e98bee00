"""An environment that needs a package which is not installed."""

import a_package_that_is_not_installed  # noqa: F401
