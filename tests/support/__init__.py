"""What tests share.

| file | what |
|---|---|
| `waiting.py` | `until(condition)` and `until_async(condition)`: polling with a deadline |
| `logs.py` | fixtures `log_lines` and `warnings_seen`: what our code logs |
"""
