"""Images in, stages out: readers, class orders, the stream of stages, the memory of exemplars, augmentation."""
