"""`ImageError`: what messages with pictures can get wrong."""


class ImageError(ValueError):
    """These messages cannot become a prompt: a picture that cannot be read, or text that pretends to be one."""
