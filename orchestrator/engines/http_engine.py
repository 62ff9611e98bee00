"""`HttpEngine`: all engines of the run, or behind its DNS names, as one `Engine`, over HTTP (docs/contracts.md)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from loguru import logger

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_client import EngineClient, TemporaryError, new_session, retrying, when_ready
from orchestrator.engines.pool import MAX_FAILURES, EnginePool, Replica, ReplicaClient, Target, slowest
from orchestrator.engines.protocol import Availability, EngineError, EngineLoad, check_reply, total_load
from transport.security.exposure import netloc
from transport.wire.generation import GenerateReply, GenerateRequest, ServedWeights, UpdateTimes

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to IP addresses. Raises `OSError` if the name cannot be resolved."""
RESOLVE_TIMEOUT_S = 10.0
DNS_INTERVAL_S = 10.0
"""Seconds between two looks at the names: a new engine takes longer to load its model, and one that is gone is noticed
by its requests at once."""


async def resolve_by_dns(host: str, port: int) -> list[str]:
    """All addresses of `host`, as the system's resolver says."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


async def expand(urls: Sequence[str], resolve: Resolve) -> list[str]:
    """`urls` with each name replaced by each of its addresses, without duplicates. Raises `EngineError`."""
    expanded = [one for url in urls for one in await _expand_one(url, resolve)]
    return list(dict.fromkeys(expanded))


async def _expand_one(url: str, resolve: Resolve) -> list[str]:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            addresses = await resolve(host, port)
    except TimeoutError:
        raise EngineError(f"{host} was not resolved within {RESOLVE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise EngineError(f"{host} cannot be resolved: {error}") from error
    if not addresses:
        raise EngineError(f"{host} has no address")
    return [urlunsplit(parts._replace(netloc=netloc(address, port))).rstrip("/") for address in sorted(addresses)]


Connect = Callable[[aiohttp.ClientSession, str], ReplicaClient]


class HttpEngine:
    """Implements `Engine`. Requests go to the replica with the least in flight; a retry may go to another one."""

    def __init__(
        self,
        config: EnginesConfig,
        admin_token: str | None = None,
        *,
        connect: Connect | None = None,
        resolve: Resolve = resolve_by_dns,
        dns_interval_s: float = DNS_INTERVAL_S,
    ) -> None:
        """`connect` makes the client of one engine; by default one of ours, which `admin_token` opens. `resolve` looks
        names up, under `resolve_dns` every `dns_interval_s`."""
        self.availability = Availability(config.urls)
        self._config = config
        self._connect: Connect = connect or (lambda session, url: EngineClient(session, url, admin_token))
        self._resolve = resolve
        self._dns_interval_s = dns_interval_s
        self._session: aiohttp.ClientSession | None = None
        self._pool = EnginePool((), self.availability)
        self._vocab_size = 0
        self._applied: Target | None = None
        """What everyone in service serves, if not a later version."""
        self._wanted: Target | None = None
        """What the last update asked for; it may have failed."""

    async def start(self) -> None:
        """See `Engine`. Learns the vocabulary."""
        if self._session is None:
            session = self._session = new_session()
            clients = [self._connect(session, url) for url in await self._first_urls()]
            self._pool = EnginePool([Replica(client) for client in clients], self.availability)
        errors = await _on_all(self._pool.replicas, self._wait_healthy)
        for replica, error in errors.items():
            self._pool.leave(replica, str(error))
        serving = self._pool.in_service()
        if not serving:
            raise EngineError("; ".join(map(str, errors.values())))
        sizes = {replica.vocab_size for replica in serving}
        if len(sizes) > 1:
            raise EngineError(f"the engines serve models of different vocabularies: {sorted(sizes)}")
        self._vocab_size = sizes.pop()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See `Engine`. Tried again elsewhere, or later, if that may help."""
        reply: GenerateReply = await retrying(self._config.max_retries)(self._generate, request)
        return reply

    async def apply_weights(self, location: str, version: int, digest: str) -> UpdateTimes | None:
        target = self._wanted = Target(ServedWeights(version=version, digest=digest), location)
        asked = self._pool.in_service()
        errors = await _on_all(asked, lambda replica: replica.bring_to(target, self._config.update_timeout_s))
        self._expel_laggards(asked, errors)
        if len(errors) == len(asked):
            reasons = "; ".join(map(str, errors.values())) or f"no engine is in service: {self.availability.reason}"
            raise EngineError(reasons)
        holding_up = [str(error) for replica, error in errors.items() if replica.is_in_service]
        if holding_up:
            raise EngineError("; ".join(holding_up))
        self._applied = target
        for replica in self._pool.in_service():
            if replica.seen_version < version:
                self._pool.leave(replica, f"it came back with version {replica.seen_version} while {version} was given")
        return slowest(replica.last_update for replica in asked)

    async def generate_on_each(self, request: GenerateRequest) -> dict[str, GenerateReply]:
        answers: dict[str, GenerateReply] = {}

        async def ask(replica: Replica) -> None:
            sampled = await replica.client.sample(request, self._config.request_timeout_s)
            answers[replica.url] = check_reply(request, sampled, self._vocab_size)

        for replica, error in (await _on_all(self._pool.in_service(), ask)).items():
            logger.warning("engine {} does not answer {}: {}", replica.url, request.request_id, error)
        return answers

    async def load(self) -> EngineLoad:
        healths = await asyncio.gather(*(replica.client.health() for replica in self._pool.in_service()))
        return total_load(health.load for health in healths)

    async def served(self) -> ServedWeights:
        asked = self._pool.in_service()
        errors = await _on_all(asked, lambda replica: replica.look(self._config.update_timeout_s))
        if errors or not asked:
            raise EngineError("; ".join(map(str, errors.values())) or "no engine is in service")
        answers = {replica.url: replica.seen for replica in asked}
        served = asked[0].seen
        if served is None or any(answer != served for answer in answers.values()):
            raise EngineError(f"the engines disagree: {answers}")
        self._applied = self._applied or Target(served, None)
        return served

    async def keep_in_service(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pool.keep_in_service(self._make_ready))
            if self._config.resolve_dns:
                tasks.create_task(self._follow_names())

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _first_urls(self) -> list[str]:
        """Whom to wait for at start-up. Names that have no address yet are waited for, too."""
        if not self._config.resolve_dns:
            return [url.rstrip("/") for url in self._config.urls]
        return await when_ready(
            lambda: expand(self._config.urls, self._resolve), self._config.start_timeout_s, "the name of an engine"
        )

    async def _follow_names(self) -> None:
        """Let the pool follow the names, until cancelled. A resolver that fails changes nothing."""
        while True:
            await asyncio.sleep(self._dns_interval_s)
            try:
                urls = await expand(self._config.urls, self._resolve)
            except EngineError as error:
                logger.warning("the engines stay as they are: {}", error)
                continue
            known = {replica.url: replica for replica in self._pool.replicas}
            for url in urls:
                if url not in known and self._session is not None:
                    self._pool.join(Replica(self._connect(self._session, url)))
            for url, replica in known.items():
                if url not in urls:
                    self._pool.drop(replica)

    async def _generate(self, request: GenerateRequest) -> GenerateReply:
        """One try. `TemporaryError` if another may succeed."""
        if self._session is None:
            raise EngineError("the engine is closed or was not started")
        replica = await self._pool.pick()
        version = replica.seen_version
        with replica.busy():
            try:
                sampled = await replica.client.sample(request, self._config.request_timeout_s)
            except TemporaryError as error:
                if not error.is_busy:
                    self._pool.failed(replica, str(error))
                raise TemporaryError(f"request {request.request_id}: {error}", error.retry_after_s) from error
        self._pool.answered(replica)
        reply = check_reply(request, sampled, self._vocab_size)
        newest = reply.versions[-1].version
        if newest < version:
            self._pool.leave(replica, f"it sampled with version {newest} after it was seen to serve {version}")
            raise TemporaryError(f"request {request.request_id}: {replica.url} has lost version {version}")
        return reply

    async def _wait_healthy(self, replica: Replica) -> None:
        """Poll the health endpoint until it says `ok`; `EngineError` with the last problem at the deadline."""
        health = await when_ready(replica.client.health, self._config.start_timeout_s, f"engine {replica.url}")
        replica.vocab_size = health.vocab_size

    def _expel_laggards(self, asked: Sequence[Replica], errors: "dict[Replica, EngineError]") -> None:
        """Take engines out of service that did not answer, or failed again and again where another engine succeeded."""
        for replica in asked:
            error = errors.get(replica)
            replica.num_failed_updates = 0 if error is None else replica.num_failed_updates + 1
            if isinstance(error, TemporaryError):
                self._pool.failed(replica, str(error))
            elif error is not None and len(errors) < len(asked) and replica.num_failed_updates >= MAX_FAILURES:
                self._pool.leave(replica, str(error))

    async def _make_ready(self, replica: Replica) -> None:
        """The `MakeReady` of the pool: health and vocabulary are right, and it serves the weights that it should."""
        replica.vocab_size = (await replica.client.health()).vocab_size
        if replica.vocab_size != self._vocab_size:
            raise EngineError(f"{replica.url} has a vocabulary of {replica.vocab_size}, not {self._vocab_size}")
        await self._give_weights(replica)
        if self._applied is not None and replica.seen_version < self._applied.served.version:
            raise EngineError(f"{replica.url} got version {replica.seen_version}, but a later one is applied by now")
        replica.num_failed_updates = 0

    async def _give_weights(self, replica: Replica) -> None:
        """The newest weights; if it cannot take them, those that are applied: a torn publish must keep no one out."""
        wanted, applied = self._wanted, self._applied
        try:
            if wanted is not None:
                return await replica.bring_to(wanted, self._config.update_timeout_s)
        except EngineError as error:
            if applied is None or applied == wanted:
                raise
            logger.debug("{}; it gets version {}", error, applied.served.version)
        if applied is not None:
            await replica.bring_to(applied, self._config.update_timeout_s)


async def _on_all(
    replicas: Sequence[Replica], act: "Callable[[Replica], Awaitable[object]]"
) -> "dict[Replica, EngineError]":
    """`act` on every replica at once; all are waited for. Who failed, and why."""
    results = await asyncio.gather(*(act(replica) for replica in replicas), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    pairs = zip(replicas, results, strict=True)
    return {replica: result for replica, result in pairs if isinstance(result, EngineError)}
