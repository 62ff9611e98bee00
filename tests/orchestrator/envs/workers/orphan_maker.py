"""`python orphan_maker.py MODEL_FOLDER`: starts a toy worker, blocks it, says its pid, and waits to be killed."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from orchestrator.config.envs import EnvConfig
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.envs.workers.env import load_in_workers

WAIT_S = 120.0


async def main(folder: Path) -> None:
    command = (sys.executable, str(Path(__file__).with_name("toy_worker.py")))
    env = load_in_workers(EnvConfig(id="toy", num_workers=1), ScriptedEngine(64, 2), folder, command)
    await env.start()
    request = RolloutRequest(env.examples[0], "hang/0/0", 0, 1, 1, 1.0, 4, WAIT_S)
    run = asyncio.create_task(env.run(request))
    await asyncio.sleep(0.5)
    print(*(worker.process.pid for worker in env.workers.values()), flush=True)
    await run


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
