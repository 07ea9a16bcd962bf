# Block room: CacheBlock, descriptors, drafts (parsed puts), views.
#
# A block is one run of bytes: the key array, a zeroed gap up to the value dtype's alignment (at most 16), the value
# array. The descriptor says how to read it back; it goes to disk as it is, so parsing trusts nothing.


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class CacheBlock:
    """The KV data of one layer under one key.

    Parameters
    ----------
    layer_id
        Layer number, signed 32 bit.
    key, value
        Arrays of at most 8 dimensions; they may differ in shape and dtype.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    ValueError
        A layer number outside signed 32 bit.
    """

    cdef readonly int layer_id
    cdef readonly cnp.ndarray key
    cdef readonly cnp.ndarray value

    def __init__(self, layer_id=None, key=None, value=None):     # what is missing is named by its check
        self.layer_id = parse_layer(layer_id)
        if not isinstance(key, cnp.ndarray):
            raise TypeError(f"key must be a numpy array, not {type(key).__name__}")
        if not isinstance(value, cnp.ndarray):
            raise TypeError(f"value must be a numpy array, not {type(value).__name__}")
        self.key = key
        self.value = value

    def __repr__(self):
        return (f"CacheBlock(layer_id={self.layer_id}, key=<{self.key.dtype} {array_shape(self.key)}>, "
                f"value=<{self.value.dtype} {array_shape(self.value)}>)")


cdef tuple array_shape(cnp.ndarray a):
    return (<object>a).shape


cdef int32_t parse_layer(object layer_id) except? -1:
    if PyBool_Check(layer_id):
        raise TypeError("layer_id must be an int, not bool")
    cdef object value
    try:
        value = operator_index(layer_id)
    except TypeError:
        raise TypeError(f"layer_id must be an int, not {type(layer_id).__name__}") from None
    if not -0x80000000 <= value <= 0x7FFFFFFF:
        raise ValueError("layer_id must fit in signed 32 bits")
    return value


# -- dtypes -----------------------------------------------------------------------------------------------------------

cdef dict _names_of_dtypes = {}         # str on disk -> dtype, filled as met
cdef tuple _ML_NAMES = ("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
                        "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


cdef object plain_names():
    sizes = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 16), "c": (8, 16, 32)}
    names = set()
    for kind, widths in sizes.items():
        for width in widths:
            for order in ("|",) if width == 1 else ("<", ">"):
                names.add(f"{order}{kind}{width}")
    return names


cdef object _PLAIN_NAMES = plain_names()


cdef object dtype_of_name(str name):
    """The dtype of a name found on disk; ValueError when not one of ours, or not known to this process."""
    cdef object found = _names_of_dtypes.get(name)
    if found is not None:
        return found
    if name in _PLAIN_NAMES:
        try:
            found = np.dtype(name)
        except TypeError:
            raise ValueError("a dtype this platform lacks") from None
    elif name in _ML_NAMES:
        try:
            import ml_dtypes
            found = np.dtype(getattr(ml_dtypes, name))
        except (ImportError, AttributeError):
            raise ValueError("a dtype of the ml_dtypes package, which is not there") from None
    else:
        raise ValueError("not a dtype of a block")
    _names_of_dtypes[name] = found
    return found


cdef str name_of_dtype(object dtype):
    """The name that goes into descriptors; TypeError for dtypes that blocks cannot have."""
    cdef str name
    if dtype.fields is None and dtype.subdtype is None:
        name = dtype.str
        if name in _PLAIN_NAMES:
            return name
        name = dtype.name
        if name in _ML_NAMES and dtype.isnative:
            try:
                if dtype_of_name(name) == dtype:
                    return name
            except ValueError:
                pass
    raise TypeError(f"arrays of dtype {dtype} cannot be stored")


# -- descriptors ------------------------------------------------------------------------------------------------------

cdef inline uint64_t value_start(uint64_t size_a, uint64_t itemsize_b) noexcept:
    # The largest power of two that divides the item size, at most 16: no platform's alignment enters the format.
    cdef uint64_t a = itemsize_b & (~itemsize_b + 1)
    if a > 16:
        a = 16
    if a == 0:
        a = 1
    return align_up(size_a, a)


cdef void put_varint(list out, uint64_t x) except *:
    while x >= 0x80:
        out.append((x & 0x7F) | 0x80)
        x >>= 7
    out.append(x)


cdef int put_array(list out, object dtype, object shape) except -1:
    cdef bytes name = name_of_dtype(dtype).encode()
    out.append(len(name))
    out.extend(name)
    out.append(len(shape))
    for n in shape:
        put_varint(out, n)
    return 0


cdef int take_varint(const uint8_t *raw, size_t length, size_t *at, uint64_t *out) noexcept:
    """One canonical varint; 0 when there is none."""
    cdef uint64_t x = 0
    cdef int shift = 0
    cdef uint8_t b
    while at[0] < length and shift < 64:
        b = raw[at[0]]
        at[0] += 1
        if shift == 63 and b > 1:
            return 0
        x |= <uint64_t>(b & 0x7F) << shift
        if b < 0x80:
            if b == 0 and shift > 0:
                return 0
            out[0] = x
            return 1
        shift += 7
    return 0


cdef Desc desc_parse(bytes raw):
    """Read a descriptor; ValueError when anything about it is off."""
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(raw)
    cdef size_t length = PyBytes_GET_SIZE(raw)
    cdef size_t at = 1
    cdef uint64_t x = 0
    cdef Desc d = Desc.__new__(Desc)
    d.raw = raw
    d.index = NONE
    if length < 1 or length > 512 or p[0] > 2:
        raise ValueError("malformed descriptor")
    d.kind = p[0]
    if d.kind == 2:
        if not take_varint(p, length, &at, &x) or x > 0xFFFFFFFF:
            raise ValueError("malformed descriptor")
        d.layer_id = <int32_t>((x >> 1) ^ (~(x & 1) + 1))
    d.count = d.kind
    if d.count > 0:
        at = desc_array(d, p, length, at, 0)
    if d.count > 1:
        at = desc_array(d, p, length, at, 1)
        d.start_b = value_start(d.size_a, d.dtype_b.itemsize)
    if at != length:
        raise ValueError("malformed descriptor")
    d.payload = d.size_a + d.size_b
    d.stored = d.start_b + d.size_b if d.count > 1 else d.size_a
    return d


cdef size_t desc_array(Desc d, const uint8_t *p, size_t length, size_t at, int which) except 0:
    cdef uint64_t x = 0, size
    cdef int i, nd
    cdef Py_ssize_t *dims = &d.dims_b[0] if which else &d.dims_a[0]
    if at >= length or p[at] > 32 or at + 1 + p[at] >= length:
        raise ValueError("malformed descriptor")
    dtype = dtype_of_name(p[at + 1:at + 1 + p[at]].decode("latin-1"))
    at += 1 + p[at]
    nd = p[at]
    at += 1
    if nd > 8:
        raise ValueError("malformed descriptor")
    size = dtype.itemsize
    cdef uint64_t extent = size     # the product without zero dimensions must be sane too: numpy refuses overflows
    for i in range(nd):
        if not take_varint(p, length, &at, &x) or x > MAX_DIM:
            raise ValueError("malformed descriptor")
        dims[i] = <Py_ssize_t>x
        if x:
            if extent > MAX_DIM // x:
                raise ValueError("malformed descriptor")
            extent *= x
        size *= x
    if which:
        d.dtype_b = dtype
        d.nd_b = nd
        d.size_b = size
    else:
        d.dtype_a = dtype
        d.nd_a = nd
        d.size_a = size
    return at


cdef Desc desc_of(BlockMap t, bytes raw):
    """The table's descriptor object for these bytes."""
    cdef object found = t.desc_by_raw.get(raw)
    return <Desc>found if found is not None else desc_parse(raw)


cdef Desc desc_hold(BlockMap t, Desc d):
    """Hold a descriptor once more, entering it when no entry uses it; returns the table's object for its bytes."""
    cdef object other
    if d.index == NONE:
        other = t.desc_by_raw.get(d.raw)
        if other is not None:
            d = <Desc>other
        else:
            if not t.desc_free:
                t.descs.append(None)
                t.desc_free.append(len(t.descs) - 1)
            t.desc_by_raw[d.raw] = d
            d.index = t.desc_free.pop()
            t.descs[d.index] = d
    d.refs += 1
    return d


cdef inline Desc D(BlockMap t, uint32_t i):
    return <Desc>PyList_GET_ITEM(t.descs, i)


cdef void desc_release(BlockMap t, uint32_t i) noexcept:
    cdef Desc d = D(t, i)
    d.refs -= 1
    if d.refs == 0:
        t.descs[i] = None
        t.desc_free.append(i)
        del t.desc_by_raw[d.raw]
        d.index = NONE


# -- drafts -----------------------------------------------------------------------------------------------------------

cdef struct Source:             # where an array's bytes are: captured, since shape and strides may be set meanwhile
    char *data
    bint plain                  # C-contiguous
    int nd
    int itemsize
    Py_ssize_t dims[8]
    Py_ssize_t strides[8]


@cython.final
@cython.no_gc
@cython.freelist(16)
cdef class Draft:
    """A block parsed and checked, with references to its sources; not yet copied."""

    cdef Desc desc
    cdef readonly uint64_t stored       # bytes in the pool and on disk, gap included
    cdef readonly uint64_t payload      # bytes without the gap
    cdef readonly uint64_t extent       # occupied bytes in the pool
    cdef object a
    cdef object b
    cdef Source source_a
    cdef Source source_b
    cdef Py_buffer buffer
    cdef bint has_buffer

    def __dealloc__(self):
        if self.has_buffer:
            PyBuffer_Release(&self.buffer)


cdef int take_source(cnp.ndarray a, Source *s) except -1:
    cdef int i
    s.data = <char *>cnp.PyArray_DATA(a)
    s.plain = cnp.PyArray_IS_C_CONTIGUOUS(a)
    s.nd = cnp.PyArray_NDIM(a)
    if not s.plain:
        s.itemsize = <int>cnp.PyArray_ITEMSIZE(a)
        for i in range(s.nd):
            s.dims[i] = cnp.PyArray_DIM(a, i)
            s.strides[i] = cnp.PyArray_STRIDE(a, i)
    return 0


cdef bint holds_objects(const char *format) noexcept:
    """Whether a buffer of this format holds Python objects. Names of fields stand between colons."""
    cdef bint named = False
    if format == NULL:
        return False
    while format[0]:
        if format[0] == c':':
            named = not named
        elif format[0] == c'O' and not named:
            return True
        format += 1
    return False


cdef int check_array(cnp.ndarray a) except -1:
    if type(a) is not cnp.ndarray:
        from numpy.ma import MaskedArray
        if isinstance(a, MaskedArray):
            raise TypeError("masked arrays cannot be stored")
    if cnp.PyArray_NDIM(a) > 8:
        raise ValueError("a block array has at most 8 dimensions")
    return 0


cdef inline uint64_t mix_array(cnp.ndarray a, uint64_t h) noexcept:
    cdef int i
    # The casts: such a constant is an int of Python's otherwise, made anew each time.
    h = akv_mix(h ^ <uint64_t>cnp.PyArray_DESCR(a), <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>cnp.PyArray_NDIM(a))
    for i in range(cnp.PyArray_NDIM(a)):
        h = akv_mix(h ^ <uint64_t>cnp.PyArray_DIM(a, i), <uint64_t>0x9E3779B97F4A7C15)
    return h


cdef inline bint same_array(cnp.ndarray a, object dtype, int nd, Py_ssize_t *dims) noexcept:
    cdef int i
    if <void *>cnp.PyArray_DESCR(a) != <void *>dtype or cnp.PyArray_NDIM(a) != nd:
        return False
    for i in range(nd):
        if cnp.PyArray_DIM(a, i) != dims[i]:
            return False
    return True


cdef Desc desc_of_arrays(BlockMap t, int kind, int32_t layer, cnp.ndarray a, cnp.ndarray b):
    """Descriptor of one or two arrays, through a small cache keyed by layer, dtype identity and shape."""
    cdef uint64_t h = mix_array(a, <uint64_t>kind << 32 | <uint32_t>layer)
    cdef Desc d
    if kind == 2:
        h = mix_array(b, h)
    d = <Desc>PyList_GET_ITEM(t.desc_cache, <Py_ssize_t>(h & 127))
    if d is not None and d.kind == kind and d.layer_id == layer \
            and same_array(a, d.dtype_a, d.nd_a, d.dims_a) \
            and (kind == 1 or same_array(b, d.dtype_b, d.nd_b, d.dims_b)):
        return d
    d = desc_of_shapes(t, kind, layer, a.dtype, array_shape(a), b.dtype if kind == 2 else None,
                       array_shape(b) if kind == 2 else None)
    t.desc_cache[h & 127] = d
    return d


cdef Desc desc_of_shapes(BlockMap t, int kind, int32_t layer, object dtype_a, object shape_a, object dtype_b,
                         object shape_b):
    cdef list out = [kind]
    if kind == 2:
        put_varint(out, <uint32_t>((<uint32_t>layer << 1) ^ <uint32_t>(layer >> 31)))
    put_array(out, dtype_a, shape_a)
    if kind == 2:
        put_array(out, dtype_b, shape_b)
    return desc_of(t, bytes(out))


cdef int draft_sizes(BlockMap t, Draft d) except -1:
    d.stored = d.desc.stored
    d.payload = d.desc.payload
    d.extent = extent_of(t, d.stored)
    return 0


cdef Draft draft_block(BlockMap t, object block):
    cdef Draft d = Draft.__new__(Draft)
    cdef CacheBlock c
    if type(block) is CacheBlock:
        c = <CacheBlock>block
        if c.key is None:
            raise TypeError("an empty CacheBlock")
        check_array(c.key)
        check_array(c.value)
        d.desc = desc_of_arrays(t, 2, c.layer_id, c.key, c.value)
        d.a = c.key
        d.b = c.value
        take_source(c.key, &d.source_a)
        take_source(c.value, &d.source_b)
    elif isinstance(block, cnp.ndarray):
        check_array(block)
        d.desc = desc_of_arrays(t, 1, 0, <cnp.ndarray>block, None)
        d.a = block
        take_source(block, &d.source_a)
    elif isinstance(block, np.generic) or not PyObject_CheckBuffer(block):
        raise TypeError(f"a block is a CacheBlock, a numpy array or bytes-like, not {type(block).__name__}")
    else:
        PyObject_GetBuffer(block, &d.buffer, PyBUF_FULL_RO)
        d.has_buffer = True
        if holds_objects(d.buffer.format):
            raise TypeError("buffers of Python objects cannot be stored")
        d.desc = bytes_desc(t)
        d.stored = d.payload = <uint64_t>d.buffer.len
        d.extent = extent_of(t, d.stored)
        return d
    draft_sizes(t, d)
    return d


cdef Desc bytes_desc(BlockMap t):
    return <Desc>PyList_GET_ITEM(t.desc_cache, 128)


cdef int draft_copy(BlockMap t, Draft d, uint32_t n) except -1:
    """Copy the sources into the extent in one step, the GIL held; gap and direct-I/O tail zeroed."""
    cdef char *base = node_data(t, n)
    cdef uint64_t occupied = node_bytes(t, n)
    if d.has_buffer:
        if PyBuffer_IsContiguous(&d.buffer, c'C'):
            memcpy(base, d.buffer.buf, d.stored)
        else:
            PyBuffer_ToContiguous(base, &d.buffer, d.buffer.len, c'C')
    else:
        if d.a is not None:
            copy_array(d.a, &d.source_a, base, d.desc.size_a)
        if d.desc.count == 2:
            memset(base + d.desc.size_a, 0, d.desc.start_b - d.desc.size_a)
            if d.b is not None:
                copy_array(d.b, &d.source_b, base + d.desc.start_b, d.desc.size_b)
    if d.stored >= DIRECT_MIN:
        memset(base + d.stored, 0, occupied - d.stored)
    return 0


cdef int copy_array(cnp.ndarray a, Source *s, char *target, uint64_t size) except -1:
    # An array resized in place while its put waited has other memory; its shape and strides were captured.
    if <char *>cnp.PyArray_DATA(a) != s.data or <uint64_t>cnp.PyArray_NBYTES(a) != size:
        raise ValueError("the array was resized while its put waited")
    if s.plain:
        memcpy(target, s.data, size)
    elif size:
        akv_copy_strided(target, s.data, s.nd, s.dims, s.strides, s.itemsize)
    return 0


# -- views ------------------------------------------------------------------------------------------------------------

cdef object array_view(Pin pin, char *data, object dtype, int nd, Py_ssize_t *dims):
    cdef int flags = NPY_ARRAY_CARRAY if pin.writable else NPY_ARRAY_CARRAY_RO
    cdef object a
    Py_INCREF(dtype)        # NewFromDescr steals it
    a = PyArray_NewFromDescr(&PyArray_Type, <PyArray_Descr *>dtype, nd, dims, NULL, data, flags, NULL)
    Py_INCREF(pin)          # SetBaseObject steals it
    PyArray_SetBaseObject(<PyArrayObject *>a, <PyObject *>pin)
    return a


cdef object block_view(BlockMap t, uint32_t n, Desc d, uint64_t stored, bint writable):
    """The block in extent n as views that pin it; the table is consistent before the first allocation."""
    cdef Pin pin
    cdef CacheBlock c
    node_pin(t, n)
    try:
        pin = Pin.__new__(Pin)
    except BaseException:
        t.arena.outstanding -= 1
        node_unpin(t, n)
        raise
    pin.arena = t.arena
    pin.node = n
    pin.data = node_data(t, n)
    pin.size = <Py_ssize_t>stored
    pin.writable = writable
    pin.armed = True
    if d.kind == 0:
        return PyMemoryView_FromObject(pin)
    if d.kind == 1:
        return array_view(pin, pin.data, d.dtype_a, d.nd_a, d.dims_a)
    c = CacheBlock.__new__(CacheBlock)
    c.layer_id = d.layer_id
    c.key = array_view(pin, pin.data, d.dtype_a, d.nd_a, d.dims_a)
    c.value = array_view(pin, pin.data + d.start_b, d.dtype_b, d.nd_b, d.dims_b)
    return c


cdef uint64_t copy_block(BlockMap t, uint32_t n, Desc d, uint64_t stored, char *target) noexcept:
    """Payload bytes of extent n to target: key then value, no gap."""
    cdef char *base = node_data(t, n)
    if d.count < 2:
        memcpy(target, base, stored)
        return stored
    memcpy(target, base, d.size_a)
    memcpy(target + d.size_a, base + d.start_b, d.size_b)
    return d.payload
