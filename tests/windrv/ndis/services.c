/* NDIS' services: memory, locks, events, work items, configuration. */
#include "shim.h"

#pragma GCC diagnostic ignored "-Wattributes"

static u32 in_use;
enum { LOCK_MICROSECONDS = 60000000 };

u32 services_in_use(void)
{
    return in_use;
}

PVOID NdisAllocateMemoryWithTagPriority(NDIS_HANDLE, UINT length, ULONG, EX_POOL_PRIORITY)
{
    level_at_most(DISPATCH_LEVEL, "NdisAllocateMemory");
    return pool_allocate(length, 16);
}

VOID NdisFreeMemoryWithTagPriority(NDIS_HANDLE, PVOID memory, ULONG)
{
    level_at_most(DISPATCH_LEVEL, "NdisFreeMemory");
    pool_free(memory);
}

VOID NdisFreeMemory(PVOID memory, UINT, UINT)
{
    level_at_most(DISPATCH_LEVEL, "NdisFreeMemory");
    pool_free(memory);
}

VOID NdisMAllocateSharedMemory(NDIS_HANDLE, ULONG length, BOOLEAN, PVOID *to,
                               PNDIS_PHYSICAL_ADDRESS address)
{
    level_at_most(PASSIVE_LEVEL, "NdisMAllocateSharedMemory");
    *to = pool_allocate(length, PAGE_SIZE);
    address->QuadPart = (u64)*to;
}

VOID NdisMFreeSharedMemory(NDIS_HANDLE, ULONG, BOOLEAN, PVOID memory, NDIS_PHYSICAL_ADDRESS address)
{
    count_if(address.QuadPart != (LONGLONG)memory, &mistakes.requests);
    pool_free(memory);
}

/* Locks. A lock that this processor has already is a deadlock in Windows, and counted here. */

VOID NdisAllocateSpinLock(PNDIS_SPIN_LOCK lock)
{
    memset(lock, 0, sizeof *lock);
}

VOID NdisFreeSpinLock(PNDIS_SPIN_LOCK lock)
{
    count_if(lock->Held != 0, &mistakes.locks);
}

VOID NdisAcquireSpinLock(PNDIS_SPIN_LOCK lock)
{
    level_at_most(DISPATCH_LEVEL, "NdisAcquireSpinLock");
    KIRQL before = ndis_raise(DISPATCH_LEVEL);
    count_if(!spin_lock(&lock->Held), &mistakes.locks);
    lock->OldIrql = before;
}

VOID NdisReleaseSpinLock(PNDIS_SPIN_LOCK lock)
{
    KIRQL before = lock->OldIrql;
    count_if(!spin_unlock(&lock->Held), &mistakes.locks);
    ndis_lower(before);
}

VOID NdisDprAcquireSpinLock(PNDIS_SPIN_LOCK lock)
{
    count_if(irql != DISPATCH_LEVEL, &mistakes.levels);
    count_if(!spin_lock(&lock->Held), &mistakes.locks);
}

VOID NdisDprReleaseSpinLock(PNDIS_SPIN_LOCK lock)
{
    count_if(!spin_unlock(&lock->Held), &mistakes.locks);
}

PLIST_ENTRY NdisInterlockedInsertTailList(PLIST_ENTRY list, PLIST_ENTRY entry, PNDIS_SPIN_LOCK lock)
{
    NdisAcquireSpinLock(lock);
    PLIST_ENTRY before = IsListEmpty(list) ? NULL : list->Blink;
    InsertTailList(list, entry);
    NdisReleaseSpinLock(lock);
    return before;
}

PLIST_ENTRY NdisInterlockedRemoveHeadList(PLIST_ENTRY list, PNDIS_SPIN_LOCK lock)
{
    NdisAcquireSpinLock(lock);
    PLIST_ENTRY first = IsListEmpty(list) ? NULL : RemoveHeadList(list);
    NdisReleaseSpinLock(lock);
    return first;
}

/* Many readers or one writer. The writer may take it again, for reading, too: NetKVM does. */
struct _NDIS_RW_LOCK_EX {
    int holders; /* the number of readers; -1: a writer */
    u32 writer;  /* its processor plus 1 */
};
enum { READS, WRITES, HAS_IT };

PNDIS_RW_LOCK_EX NdisAllocateRWLock(NDIS_HANDLE)
{
    PNDIS_RW_LOCK_EX lock = pool_allocate(sizeof *lock, 16);
    memset(lock, 0, sizeof *lock);
    COUNT(in_use);
    return lock;
}

VOID NdisFreeRWLock(PNDIS_RW_LOCK_EX lock)
{
    count_if(lock->holders != 0, &mistakes.locks);
    pool_free(lock);
    __atomic_fetch_sub(&in_use, 1, __ATOMIC_RELAXED);
}

static int try_rw(PNDIS_RW_LOCK_EX lock, int write)
{
    int found = __atomic_load_n(&lock->holders, __ATOMIC_RELAXED);
    if (write ? found : found < 0)
        return 0;
    return __atomic_compare_exchange_n(&lock->holders, &found, write ? -1 : found + 1, 0,
                                       __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void take_rw(PNDIS_RW_LOCK_EX lock, PLOCK_STATE_EX state, UCHAR flags, int write)
{
    u32 me = this_processor() + 1;
    level_at_most(DISPATCH_LEVEL, "NdisAcquireRWLock");
    if (flags & NDIS_RWL_AT_DISPATCH_LEVEL)
        count_if(irql != DISPATCH_LEVEL, &mistakes.levels);
    state->OldIrql = ndis_raise(DISPATCH_LEVEL);
    if (__atomic_load_n(&lock->writer, __ATOMIC_RELAXED) == me) {
        state->LockState = HAS_IT;
        return;
    }
    u64 end = microseconds() + LOCK_MICROSECONDS;
    while (!try_rw(lock, write)) {
        __builtin_ia32_pause();
        if (microseconds() > end) {
            print("fail lock: processor %u waits for a lock with %d holders\n", me - 1,
                  lock->holders);
            machine_end();
        }
    }
    if (write)
        lock->writer = me;
    state->LockState = write ? WRITES : READS;
}

VOID NdisAcquireRWLockRead(PNDIS_RW_LOCK_EX lock, PLOCK_STATE_EX state, UCHAR flags)
{
    take_rw(lock, state, flags, 0);
}

VOID NdisAcquireRWLockWrite(PNDIS_RW_LOCK_EX lock, PLOCK_STATE_EX state, UCHAR flags)
{
    take_rw(lock, state, flags, 1);
}

VOID NdisReleaseRWLock(PNDIS_RW_LOCK_EX lock, PLOCK_STATE_EX state)
{
    int found = lock->holders;
    if (state->LockState == WRITES) {
        count_if(found != -1 || lock->writer != this_processor() + 1, &mistakes.locks);
        lock->writer = 0;
        __atomic_store_n(&lock->holders, 0, __ATOMIC_RELEASE);
    } else if (state->LockState == READS) {
        count_if(__atomic_fetch_sub(&lock->holders, 1, __ATOMIC_RELEASE) <= 0, &mistakes.locks);
    }
    ndis_lower(state->OldIrql);
}

/* Mutexes and events. */

VOID ndis_mutex_start(PKMUTEX mutex)
{
    memset(mutex, 0, sizeof *mutex);
    mutex->Header.Type = SynchronizationEvent;
    mutex->Header.SignalState = 1;
}

VOID ndis_mutex_take(PKMUTEX mutex)
{
    KeWaitForSingleObject(mutex, Executive, KernelMode, FALSE, NULL);
}

VOID ndis_mutex_release(PKMUTEX mutex)
{
    count_if(mutex->Header.SignalState != 0, &mistakes.locks);
    mutex->Header.SignalState = 1;
}

VOID NdisInitializeEvent(PNDIS_EVENT event)
{
    memset(event, 0, sizeof *event);
    event->Event.Header.Type = NotificationEvent;
}

VOID NdisSetEvent(PNDIS_EVENT event)
{
    KeSetEvent(&event->Event, 0, FALSE);
}

VOID NdisResetEvent(PNDIS_EVENT event)
{
    event->Event.Header.SignalState = 0;
}

BOOLEAN NdisWaitEvent(PNDIS_EVENT event, UINT milliseconds)
{
    LARGE_INTEGER time = {.QuadPart = milliseconds * -10000ll};
    return KeWaitForSingleObject(&event->Event, Executive, KernelMode, FALSE,
                                 milliseconds ? &time : NULL) == STATUS_SUCCESS;
}

VOID NdisMSleep(ULONG time)
{
    LARGE_INTEGER interval = {.QuadPart = time * -10ll};
    KeDelayExecutionThread(KernelMode, FALSE, &interval);
}

VOID NdisStallExecution(ULONG time)
{
    KeStallExecutionProcessor(time);
}

VOID NdisGetCurrentSystemTime(PLARGE_INTEGER time)
{
    time->QuadPart = microseconds() * 10;
}

/* Work items. */

typedef struct Work {
    NDIS_IO_WORKITEM *run;
    PVOID context;
    struct Work *next;
} Work;
static Work *waiting;
static int work_lock;

NDIS_HANDLE NdisAllocateIoWorkItem(NDIS_HANDLE)
{
    Work *work = pool_allocate(sizeof *work, 16);
    memset(work, 0, sizeof *work);
    COUNT(in_use);
    return work;
}

VOID NdisFreeIoWorkItem(NDIS_HANDLE work)
{
    pool_free(work);
    __atomic_fetch_sub(&in_use, 1, __ATOMIC_RELAXED);
}

VOID NdisQueueIoWorkItem(NDIS_HANDLE handle, NDIS_IO_WORKITEM *run, PVOID context)
{
    Work *work = handle, **last = &waiting;
    level_at_most(DISPATCH_LEVEL, "NdisQueueIoWorkItem");
    work->run = run;
    work->context = context;
    work->next = NULL;
    spin_lock(&work_lock);
    while (*last)
        last = &(*last)->next;
    *last = work;
    spin_unlock(&work_lock);
}

static Work *take_work(void)
{
    spin_lock(&work_lock);
    Work *first = waiting;
    if (first)
        waiting = first->next;
    spin_unlock(&work_lock);
    return first;
}

int run_work_items_ndis(void)
{
    int any = 0;
    for (Work *work; (work = take_work()); any = 1)
        work->run(work->context, work);
    return any;
}

/* Configuration: the defaults of the INF file, which `build` reads. */

static const struct {
    const char *name;
    u32 value;
} DEFAULTS[] = {
#include "netkvm_parameters.h"
};
enum { MAX_REPLACED = 8, CONFIGURATION = 1 };
static struct {
    const char *name;
    u32 value;
} replaced[MAX_REPLACED];
static u32 replaced_count;

void parameter_set(const char *name, u32 value)
{
    if (!name) {
        replaced_count = 0;
        return;
    }
    replaced[replaced_count].name = name;
    replaced[replaced_count++].value = value;
}

NDIS_STATUS NdisOpenConfigurationEx(PNDIS_CONFIGURATION_OBJECT, PNDIS_HANDLE handle)
{
    *handle = (NDIS_HANDLE)CONFIGURATION;
    return NDIS_STATUS_SUCCESS;
}

/* The driver's own parameters: the INF file has `DisableMSI` 0, as the driver by itself. */
VOID NdisOpenConfigurationKeyByName(PNDIS_STATUS status, NDIS_HANDLE, PNDIS_STRING, PNDIS_HANDLE)
{
    *status = NDIS_STATUS_FAILURE;
}

VOID NdisCloseConfiguration(NDIS_HANDLE)
{
}

static int is_named(PNDIS_STRING wide, const char *name)
{
    u32 length = strlen(name);
    if (wide->Length != length * sizeof(WCHAR))
        return 0;
    for (u32 i = 0; i < length; i++)
        if ((wide->Buffer[i] | 0x20) != (name[i] | 0x20))
            return 0;
    return 1;
}

VOID NdisReadConfiguration(PNDIS_STATUS status, PNDIS_CONFIGURATION_PARAMETER *to, NDIS_HANDLE,
                           PNDIS_STRING name, NDIS_PARAMETER_TYPE)
{
    static NDIS_CONFIGURATION_PARAMETER parameter;
    *status = NDIS_STATUS_FAILURE;
    *to = &parameter;
    for (u32 i = 0; i < sizeof DEFAULTS / sizeof *DEFAULTS; i++)
        if (is_named(name, DEFAULTS[i].name)) {
            parameter.ParameterData.IntegerData = DEFAULTS[i].value;
            *status = NDIS_STATUS_SUCCESS;
        }
    for (u32 i = 0; i < replaced_count; i++)
        if (is_named(name, replaced[i].name)) {
            parameter.ParameterData.IntegerData = replaced[i].value;
            *status = NDIS_STATUS_SUCCESS;
        }
}

/* The INF file has no address of its own. */
VOID NdisReadNetworkAddress(PNDIS_STATUS status, PVOID *, PUINT, NDIS_HANDLE)
{
    *status = NDIS_STATUS_FAILURE;
}

/* Strings, in pool memory as in Windows. */

VOID NdisInitializeString(PNDIS_STRING string, PUCHAR text)
{
    u32 length = strlen((char *)text);
    string->Length = length * sizeof(WCHAR);
    string->MaximumLength = string->Length + sizeof(WCHAR);
    string->Buffer = pool_allocate(string->MaximumLength, 16);
    for (u32 i = 0; i <= length; i++)
        string->Buffer[i] = text[i];
}

VOID NdisInitUnicodeString(PNDIS_STRING string, PCWSTR text)
{
    string->Length = wcslen(text) * sizeof(WCHAR);
    string->MaximumLength = string->Length + sizeof(WCHAR);
    string->Buffer = (PWSTR)text;
}

VOID NdisFreeString(NDIS_STRING string)
{
    pool_free(string.Buffer);
}

/* The rest of the kernel. */

UINT NdisGetVersion(VOID)
{
    return NDIS_MINIPORT_MAJOR_VERSION << 16 | NDIS_MINIPORT_MINOR_VERSION;
}

/* With `debug=LEVEL`: the driver's messages. */
void ndis_debug(int level, const char *format, ...)
{
    if (level >= (int)option_number("debug", 0))
        return;
    va_list list;
    va_start(list, format);
    print("# netkvm: ");
    print_list(format, list);
    print("\n");
    va_end(list);
}

void ndis_bugcheck(const char *file, int line)
{
    print("fail netkvm: an assertion at line %u of %s\n", line, file);
    machine_end();
}

/* Called for a pure virtual method. */
void __cxa_pure_virtual(void)
{
    ndis_bugcheck("a pure virtual method", 0);
}

unsigned long _byteswap_ulong(unsigned long value)
{
    return __builtin_bswap32(value);
}

unsigned short _byteswap_ushort(unsigned short value)
{
    return __builtin_bswap16(value);
}

PVOID MmGetSystemRoutineAddress(PUNICODE_STRING)
{
    return NULL;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(MmGetSystemRoutineAddress);
