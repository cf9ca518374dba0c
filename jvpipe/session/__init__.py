"""The sessions of pipelines: their options, planning, measuring, steps, migrations and adapting."""
