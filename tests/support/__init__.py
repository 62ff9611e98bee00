"""What tests of all folders share. `tests/conftest.py` makes the fixtures known.

| file | what |
|---|---|
| `waiting.py` | `until(condition)` and `until_async(condition)`: polling with a deadline |
| `logs.py` | fixtures `log_lines` and `warnings_seen`: what our code logs |
| `process.py` | `Process`, `Service`, fixtures `start` and `start_ranks`: real processes that end with the test |
| `metrics.py` | `read_metrics`: the rows of a metrics file |
| `nursery.py` | warm starts: a process that has imported a service forks it |
| `models.py` | tiny random text models, a tokenizer, publishes of their weights |
| `fakes.py` | `FakeTrainer` and `Served` (a batch server): the other side of the wire, in a thread |
| `ranks.py` | `run_ranks`: processes with a gloo group; gradients, and how far they are apart |

Fakes with one user stand beside it: `orchestrator/toys.py` (environment, engine, whole orchestrator),
`orchestrator/engine_server.py` (an engine over HTTP), `runtime/launch/fake_services.py` (services for `rl`),
`inference/tiny_vision.py` and `trainer/images/tiny_vlm.py` (vision models).
"""
