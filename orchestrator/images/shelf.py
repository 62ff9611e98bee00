"""`PictureShelf`: pictures that somebody holds, so that the next one who needs them need not have a copy."""

from weakref import WeakValueDictionary

from orchestrator.images.pictures import Pictures


class PictureShelf:
    """Keeps nothing alive. Equal digests are equal pictures."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[tuple[str, ...], Pictures] = WeakValueDictionary()

    def __len__(self) -> int:
        """Pictures, and rows of pictures, that are held."""
        return len(self._held)

    def find(self, digests: tuple[str, ...]) -> Pictures | None:
        """These pictures, if somebody holds them."""
        return self._held.get(digests)

    def hold(self, pictures: Pictures) -> Pictures:
        """Those that are held already, or else `pictures`, which others will find from now on."""
        return self._held.setdefault(pictures.digests, pictures)
