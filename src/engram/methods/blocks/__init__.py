"""Building blocks of methods: families of methods, phases, losses, extensions, importance."""
