"""The sessions of pipelines: from a user's options to plans, steps, migrations and checkpoints.

Files in the order in which a run needs them:

    options, arguments, checked_settings          options are checked and become `settings`
    measuring, planning                           seconds and bytes; a plan that keeps the limit
    model_planner, compiled_plans                 the first plan of a model, ready to run
    engine, session, evaluation, checkpoints      a run, its steps, evaluations and checkpoints
    trigger, adapt                                another plan, as asked or if devices become slow
    question, forecast, signing, forecasts        plans for hardware that is not here
"""
