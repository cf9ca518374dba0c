"""The cost model that all planners share.

    problem, pins, planner        what a planner is asked, and the decision that it answers with
    stage_bytes, stage_cost       the bytes and the seconds of one stage, by definition
    segments, spans, keep_all     the same numbers for many pairs of cuts at once, as arrays
    forecast                      the seconds of a step, simulated
    shapes, local_segments        how many devices each stage has
    even, chain_dp, unfolded      tools that several planners use

jvpipe's own planner is in planners/joint, and the planners of papers are in papers.
"""
