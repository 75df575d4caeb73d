"""The Kubernetes controller: TrainingJobs in, supervised jobs out. `crd` and `reconcile` are pure."""
