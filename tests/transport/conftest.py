from hypothesis import settings

# The machine is shared: how long one example takes says nothing.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")
