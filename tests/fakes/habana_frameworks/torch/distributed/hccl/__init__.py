"""The fake of the module that registers the process group ``hccl``; there is none here, Gloo stands in for it."""
