"""The contracts between services: wire types, codec, durable outbox, batch server and client, weight manifests.

Imports none of our other packages and never torch, so that every service, and any tool a user writes, can speak
the protocol with nothing but numpy, msgspec and pyzmq.
"""
