"""The demonstration: a real small model, fetched, converted, planned and run at every size (`make demo`)."""
