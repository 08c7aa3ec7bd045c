"""Run configurations, sbatch files and benchmarks that come with pagedgen."""
