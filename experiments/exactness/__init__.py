"""Whether cuts, fates, limits and migrations leave every bit as one stage that keeps everything has
it.
"""
