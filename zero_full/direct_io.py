"""O_DIRECT, with which reads and writes bypass the page cache."""

import errno
import os

O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
# Its errors: unaligned blocks, memory that cannot be pinned, file systems that lack it. EIO is none of them:
# it is the disk's, and a write through the page cache would only hide it until later.
NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOTSUP)
