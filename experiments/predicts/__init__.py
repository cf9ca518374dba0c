"""What others measured, beside what the cost model predicts.

python -m experiments.predicts --json OUT
"""
