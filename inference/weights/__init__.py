"""New weights for both engines: fetched, checked, and adapters. Imports torch."""
