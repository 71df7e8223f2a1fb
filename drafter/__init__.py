"""The science of Fledge: P-EAGLE drafters, from conversations to a checkpoint that vLLM serves.

Runs from a shell with no service at all (`python -m drafter --help`). Nothing in this package
imports Prefect, MLflow, Great Expectations, boto3 or SageMaker; an import contract keeps it so.
"""

__version__ = "0.1.0"
