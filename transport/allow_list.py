"""`AllowList`: the ZAP handler of a context. CURVE alone accepts any client key; this is what makes it refuse."""

import zmq
import zmq.asyncio
from zmq.utils import z85

from transport.rejections import Reason, Rejections
from transport.security import CurveKeys

_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks (RFC 27)
_VERSION = b"1.0"


class AllowList:
    """Answers libzmq's question "may this key connect?" for each CURVE handshake of `context`, its owner."""

    def __init__(self, context: zmq.asyncio.Context, keys: CurveKeys, rejections: Rejections) -> None:
        self._keys = keys
        self._rejections = rejections
        self._socket = context.socket(zmq.REP, socket_class=zmq.asyncio.Socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            request = await self._socket.recv_multipart()
            await self._socket.send_multipart(self._decide(request))

    def _decide(self, request: list[bytes]) -> list[bytes]:
        request_id, address = request[1], request[3].decode("ascii", "replace")
        mechanism, credentials = request[5], request[6:]
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if key in self._keys.peers:
            return [_VERSION, request_id, b"200", b"OK", key, b""]
        name = key.decode("ascii")[:8] or mechanism.decode("ascii", "replace")
        self._rejections.add(Reason.KEY, address, f"client key {name}... is not on the allow-list (client*.public)")
        return [_VERSION, request_id, b"400", b"key is not on the allow-list", b"", b""]
