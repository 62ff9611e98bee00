"""Images in messages: found, cut into patches once, and put into prompts at the token level (docs/images.md).

Numpy and Pillow only, because this service never imports torch. The patches are those of Hugging Face's PIL image
processor to the last bit (`tests/chat/test_images.py`).
"""
