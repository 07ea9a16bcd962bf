# Flight room: reads that go out together, and who gets their blocks, without Python for each of them.


cdef class Request:
    """A read that a ring does by itself."""


@cython.final
cdef class Answers:
    """What one call gets for its keys; the stub says more."""

    cdef readonly list keys
    cdef readonly list results
    cdef readonly list codes
    cdef readonly bint counted
    cdef public Py_ssize_t missing
    cdef public object future
    cdef public object gather
    cdef readonly bint over

    def __init__(self, list keys not None, list results not None, absent, future, bint counted=True):
        cdef Py_ssize_t place
        self.keys = keys
        self.results = results
        self.codes = [1] * len(keys)
        for place in absent:
            self.codes[place] = A_PENDING
        self.missing = len(absent)
        self.future = future
        self.counted = counted

    def drop(self):
        self.over = True
        self.results = []
        self.gather = None          # which holds this

    def fail(self, error):
        self.over = True
        self.gather = None
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    cpdef answer(self, Py_ssize_t place, object block, int code):
        self.results[place] = block
        self.codes[place] = code
        if code == A_PENDING:       # it is to be looked for again
            self.missing += 1
            return
        self.missing -= 1
        if self.missing == 0:
            self.complete()

    cdef int complete(self) except -1:
        self.gather = None
        if self.future is not None and not self.future.done():
            self.future.set_result(None)
        return 0


cdef class Flight:
    """Reads that were handed in together; the stub says more."""

    cdef readonly list loads
    cdef public Py_ssize_t begun    # of them, that were given to the ring
    cdef readonly Py_ssize_t left   # that have not ended

    def __init__(self):
        self.loads = []

    def give_up(self):
        cdef list free = [], lost = []
        cdef Load l
        for l in self.loads:
            if l.stage == FLIES:
                l.stage = LOST
                lost.append(l)
            elif l.stage < LOST:
                load_over(l)
                free.append(l)
        self.begun = PyList_GET_SIZE(self.loads)
        return free, lost

    def cut(self):
        cdef list free = []
        cdef Load l
        while self.begun < PyList_GET_SIZE(self.loads):
            l = <Load>PyList_GET_ITEM(self.loads, self.begun)
            load_over(l)
            free.append(l)
            self.begun += 1
        return free

    def took(self, Py_ssize_t begun):
        while self.begun < begun:
            (<Load>PyList_GET_ITEM(self.loads, self.begun)).stage = FLIES
            self.begun += 1


cdef Flight load_over(Load l):
    """The read is no part of its flight any more."""
    cdef Flight flight = l.flight
    l.stage = ENDED
    l.flight = None             # which lists it
    flight.left -= 1
    return flight


def aim(list loads not None, dict fds not None, uint32_t mask, uint32_t memory_mask, uint64_t largest,
        Flight flight not None):
    """Prepare reads for a flight; what cannot fly comes back."""
    cdef list rest = []
    cdef Load l
    cdef uint32_t slot = NONE
    cdef int fd = -1
    for l in loads:
        if l.slot != slot:
            slot = l.slot
            fd = fds.get(slot, -1)
        l.span = <uint32_t>l.stored
        if l.stored >= DIRECT_MIN:
            l.span = <uint32_t>align_up(l.stored, 4096)
        l.data = node_data(l.table, l.node)
        if fd < 0 or l.span > largest or (l.offset | l.span) & mask or <size_t>l.data & memory_mask or l.status:
            rest.append(l)
            continue
        l.fd = fd
        l.stage = WAITS
        l.flight = flight
        flight.loads.append(l)
        flight.left += 1
    return rest


def land(list found not None):
    """Take out of what a ring has done the reads that moved all they should."""
    cdef list landed = [], others
    cdef tuple each
    cdef Load l
    for each in found:
        if type(each[0]) is Load:
            l = <Load>each[0]
            if l.stage == FLIES and <int64_t>each[1] == l.span:
                l.stage = LANDED
                landed.append(l)
    if landed:
        others = [each for each in found if not (type(each[0]) is Load and (<Load>each[0]).stage == LANDED)]
        found[:] = others
    return landed


def verify(list landed not None, uint64_t budget):
    """Take reads off the front, some bytes of them, and compare their checksums."""
    cdef list good = [], bad = [], over = []
    cdef Flight flight
    cdef Py_ssize_t number = 0
    cdef uint64_t spent = 0
    cdef Load l
    while number < PyList_GET_SIZE(landed) and (number == 0 or spent < budget):
        l = <Load>PyList_GET_ITEM(landed, number)
        number += 1
        if l.stage != LANDED:   # given up meanwhile
            continue
        flight = load_over(l)
        if flight.left == 0:
            over.append(flight)
        spent += l.stored
        if xxh3_64_intdigest(PyMemoryView_FromMemory(l.data, <Py_ssize_t>l.stored, 0x100)) == l.checksum:
            memset(l.data + l.stored, 0, l.span - l.stored)
            good.append(l)
        else:
            bad.append(l)
    del landed[:number]
    return good, bad, over, spent


def strayed(Load l not None):
    """End a read that did not move all it should: its flight, and whether it had been given up."""
    cdef bint lost = l.stage == LOST
    return load_over(l), lost
