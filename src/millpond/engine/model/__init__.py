"""DeepSeek-V4.1, one mechanism a module. Import the modules, not this package: most load torch."""
