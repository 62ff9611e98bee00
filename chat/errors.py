"""What conversations and model folders can get wrong."""


class ImageError(ValueError):
    """These messages cannot become a prompt: an image that cannot be read, or text that pretends to be one."""


class ChatTemplateError(ValueError):
    """The template refused these messages, or does not compile."""
