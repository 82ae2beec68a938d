"""Parts of `python -m jax_ep bench`: what is exchanged, by whom, how it is timed, how it is shown."""
