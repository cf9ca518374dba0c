"""Between facade and engine: compiled plans, arguments, planning, migrations asked for, adapting."""
