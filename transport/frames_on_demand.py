"""`FramesOnDemand`: the frames of samples with images, which are not worth holding twice.

A frame repeats every byte of its sample, and pixels are nearly all of them. Encoding such a sample is one copy at the
speed of memory, so it is done once to learn size and hash, and again when the frame is written, into memory that the
frame before has just left. A batch that is cut then needs the room of one more sample, not of one more batch.
"""

from collections.abc import Iterator, Sequence
from typing import overload

from transport.alignment import LINE_BYTES, address_of, lead_bytes
from transport.codec import encode, encode_into
from transport.sample import TrainingSample


class FramesOnDemand(Sequence[bytes]):
    """One frame per sample, the same bytes whenever it is looked at. The samples must be sound, and must not change."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(place, slice):
            return FramesOnDemand(self._samples[place])
        return encode(self._samples[place])

    def pieces(self, position: int) -> Iterator[memoryview]:
        """All frames, to be written to a file one behind the other from `position` on.

        They lie in memory as they will in the file, unless the memory had to move while it grew: then one may not.
        Each is of use until the next one is asked for, which takes its memory: `BufferError` if a slice of it is kept.
        """
        memory = bytearray(LINE_BYTES)
        for sample in self._samples:
            first = lead_bytes(position, address_of(memory))
            encode_into(sample, memory, first)
            with memoryview(memory) as whole, whole[first:] as frame:
                yield frame
                position += len(frame)
