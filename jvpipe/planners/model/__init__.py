"""The cost model that all planners share.

    problem, pins, planner        what a planner is asked, and the decision that it answers with
    infeasible, accuracy          errors: nothing fits the limit, or numbers are too large
    stage_bytes, stage_cost       the bytes and the seconds of one stage, by definition
    shared_state                  the optimizer state that the replicas of a stage divide
    segments, keep_all            the same numbers for many pairs of cuts at once, as arrays
    grids, spans, crossings       sums over many segments, on which these arrays are built
    stage_simulation              the seconds of a step, simulated
    shapes, local_segments        how many devices each stage has
    even, chain_dp, unfolded      tools that several planners use

jvpipe's own planner is in planners/joint, and the planners of papers are in papers.
"""
