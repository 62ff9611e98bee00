"""What tests of all folders share, and the index of all modules below `tests/` that are not test files.

A test file tests the source file or room of its name. What several of them need lies in a module beside them, or here.
Programs are started by tests as `python -m tests.<folder>.<name>`. `tests/architecture/test_helper_index.py` compares
this index with the folders.

tests/
    conftest.py  order of the files; fixtures `once`, `copy_model` and `first_run`, made once for a session

tests/support/
    fakes.py  `FakeTrainer` and `Served` (a batch server): the other side of the wire, in a thread
    ipv6.py  `needs_ipv6`: skips a test on a machine without an IPv6 loopback
    logs.py  fixtures `log_lines` and `warnings_seen`: what our code logs
    metrics.py  `read_metrics`: the rows of a metrics file
    models.py  tiny random text models, a tokenizer, publishes of their weights
    nursery.py  `Nursery`: warm starts: a process that has imported a service forks it
    nursery_process.py  program: the process that a `Nursery` starts
    once.py  `Once`: a folder that is filled once for all processes of a session
    process.py  `Process`, `Service`, fixtures `start` and `start_ranks`: real processes that end with the test
    ranks.py  `run_ranks`: processes with a gloo group; gradients, and how far they are apart
    waiting.py  `until` and `until_async`: polling with a deadline

tests/architecture/
    sample_walk.py  counts the files that one sample walks through; run it by hand
    sources.py  source files of the packages, their syntax trees and nodes

tests/browser/
    conftest.py  fixtures `browser`, `watched` and pages of generated runs, in Debian's chromium

tests/chat/
    conftest.py  fixtures `tokenizer` (characters) and `bpe`
    drawn.py  images of noise, messages with them, a model folder with an image processor
    model_folders.py  small Hugging Face folders: a character tokenizer or a BPE one, with a choice of chat templates
    replies.py  `make_reply`: a sound engine reply; checks on branches

tests/cli/
    console.py  `run` and `resolve`: command lines as users type them, in this process

tests/deploy/
    commands.py  `resolve`: command lines of deployment files through the real CLIs; variables of compose

tests/deploy/topology/
    conftest.py  fixture `nodes`: four machines on one network
    machines.py  `network`: machines as network namespaces; `Machine`: processes on one, with a disk of its own

tests/docs/
    pages.py  commands, code blocks and links of the pages; `train`: the first run of the quick start

tests/examples/
    conftest.py  fixtures `tokenizer` and `random_folder` (a model folder)
    traces.py  `finished_trace`, `scored`: traces with chosen replies, as verifiers hands them to a task's scoring

tests/faults/
    chaos_proxy.py  `ChaosProxy`: a TCP proxy on loopback that delays, cuts, drops, duplicates and swaps on demand
    conftest.py  options `--kills`, `--frames`, `--minutes`; fixtures `record`, `nurseries`, `random_model`

tests/faults/exactly_once/
    conftest.py  fixtures `fixed_run`, `campaign` and `reference`
    fixed_run.py  `FixedRun`: a small run whose final weights depend on its seeds alone
    kills.py  `Aim`: when a service is killed; `Campaign`: runs with kills, each of which must end like the reference
    signs.py  signs on disk of what a process does; `Result` and `Account`: what a finished run left, and its checks

tests/faults/liveness/
    conftest.py  fixture `model`: a tiny model that any service can load
    jumping_clock.py  program: a service on a machine with a bad clock
    light_trainer.py  program: a trainer without a model, for long runs
    run.py  `live_run`: orchestrator with its toy backend, a proxy that misbehaves, the real trainer

tests/faults/security/
    attacked_server.py  program: a batch server to attack
    future_schema.py  program: a module as if it came from a later release
    guarded_run.py  `guarded_run`: a real orchestrator with keys and an honest trainer that knows them
    hostile_frames.py  `hostile_messages`: an endless mix of wrong messages; `attack`: sends them to a live batch server
    stranger.py  program: somebody who should not be served
    unread_router.py  program: a server socket that nobody reads while peers flood it

tests/faults/storage/
    conftest.py  fixtures `services`, `disk`, `fixed_run`, `reference`
    save_kills.py  `SaveKills`: a trainer that is killed in checkpoint saves, and what it left
    services.py  `Services` and `EngineProcess`: services to kill and start again; `Announcements`: published weights
    small_disk.py  `SmallDisk`: a file system of a few megabytes; `check_whole`: no half file under a final name
    weight_trainer.py  program: a trainer, as far as engines see it on the `zmq` channel

tests/golden/
    schema_3.py  values of the files in `schema_3/`; program: writes those that do not exist

tests/inference/
    adapters.py  `make_adapter`, `publish_adapter`: adapters and their publishes
    conftest.py  fixtures `model`, `model_dir`, `engine` and `client`
    contract_server.py  `running_server`: a server of either engine; `generate`, `apply`: a client; `server_process`
    gate.py  `Gate` and `held`: stop an engine's thread where a test wants it
    tiny_vision.py  tiny Qwen-VL models, images for them, and what the models themselves say

tests/inference/vllm_engine/
    fake_vllm.py  program: stands in for vLLM's server where the supervisor is tested

tests/integration/
    circle.py  `run_rl`: a whole run as a user starts it; `Finished`: what it left; `make_copy_model`

tests/orchestrator/
    builders.py  rollouts, tickets and groups with only the interesting part spelled out
    conftest.py  fixtures `env_modules` and `tokenizer`
    engine_server.py  `EngineServer`: an engine over HTTP that misbehaves on request
    toy_service.py  program: the real orchestrator process with a toy backend
    toys.py  `ToyEnv`, `run_toy`: a whole orchestrator with a toy environment and a scripted engine

tests/orchestrator/batches/
    batch_simulation.py  `LineSimulation`: real admission, ledger, state and outbox order with random timing and kills

tests/orchestrator/envs/modules/
    edge_broken.py  environment that cannot be imported
    edge_hooks.py  environment whose hooks leave marks that its reward reads
    edge_incomplete.py  environment that needs a package which is not installed
    edge_notes.py  environment whose state is worth keeping
    edge_race.py  environment that scores jointly: the longest reply wins
    edge_runtime.py  environment whose reward uses the runtime
    edge_silent.py  environment with a task without a prompt
    edge_single.py  environment with one turn that behaves as its args say
    edge_stops.py  environment with a stop hook
    edge_two_turns.py  environment with two turns, an edited history or an error

tests/orchestrator/envs/workers/
    orphan_maker.py  program: starts a toy worker, blocks it and waits to be killed
    toy_worker.py  program: the real worker with a toy environment, without the seconds of verifiers

tests/runtime/launch/
    fake_services.py  program: services for `rl` that behave as a config key says

tests/trainer/
    conftest.py  fixtures `model_path`, `recording`, `straight_run`, `policy`, `references` and `rank_run`
    rank_checks.py  program for torchrun: what two ranks must agree on
    rank_worker.py  `train_all`: real ranks that train every scenario and write down what they saw
    reference.py  what the trainer must compute, written plainly, with none of its code
    runs.py  recorded batches, runs of the trainer on them, `FakeOrchestrator`, `FakeShutdown`
    scenarios.py  a tiny Qwen3, batches of random samples, and ways of splitting a batch that keep its gradient
    tiny.py  `Tiny`: a model and an optimizer small enough to train in a test of one part
    waiting_ranks.py  program for torchrun: two ranks that ask an orchestrator, one of them late

tests/trainer/critic/
    critic_cases.py  `CriticCase`: ways of training with a critic; `PlainCritic`: its gradient by plain float64 code

tests/trainer/images/
    tiny_vlm.py  tiny vision-language models, image samples for them, and reference gradients

tests/trainer/model/
    conftest.py  fixtures `model_paths`, `policies`, `image_references` and `two_ranks`
    image_ranks.py  `train_families`: real ranks that train image samples of both families

tests/transport/
    conftest.py  hypothesis without a deadline
    samples.py  `make_sample`, `make_batch`: a pure function of their numbers

tests/transport/outbox/
    writer.py  program: fills an outbox until it is killed

tests/transport/server/
    serve.py  program: a batch server

tests/transport/weights/
    weight_ranks.py  `WeightRanks`: the weight servers of a few ranks

tests/viewer/
    conftest.py  fixtures `run_path` and `generated`: a generated run, opened once
    generated_run.py  `make_run`: a run directory as the services would have left it
"""
