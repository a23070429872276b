"""Training of translators: `preparation` makes a task from a configuration, `fitting` trains it, `state` saves it.

`import regard.lab` does not load these modules, since they need Lightning.
"""
