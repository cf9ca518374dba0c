"""Planners: `joint/` searches for plans, `model/` counts their seconds and bytes.

The files here rank and explain plans (`answer.py`, `*_reasons.py`), cut layers in two
(`splitting.py`), change plans as users ask (`user_fates.py`), bring optimizer state back from the
host (`state_on_host.py`), and find better cuts while training runs (`replanning.py`).
"""
