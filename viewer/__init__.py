"""Look inside a run: the page of `rl view`, the file of `rl report`, and a view for terminals.

    files of the run ──▶ RunIndex (SQLite, byte offsets) ──▶ Run ──▶ Answers ──▶ views/server.py     live page
                                                                        ├──────▶ views/report.py     one HTML file
                                                                        └──────▶ views/terminal.py   text

It only reads what a run records anyway, and `/health` of its services. It imports `runtime` and nothing of the
services: a run directory is all it needs. Whatever a model or an environment wrote is untrusted text: pages put it into
the document as text nodes, terminals get it without control characters.
"""
