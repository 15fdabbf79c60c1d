/* NDIS' services for drivers: memory, locks, events, work items, configuration, device memory.
 * Included by ndis.h. */

#define NdisZeroMemory(to, length) memset(to, 0, length)
#define NdisMoveMemory(to, from, length) memmove(to, from, length)
#define NdisInterlockedIncrement(at) __sync_add_and_fetch(at, 1)
#define NdisInterlockedDecrement(at) __sync_sub_and_fetch(at, 1)
#define NdisInterlockedAddLargeStatistic(at, value)                                                \
    ((void)__sync_add_and_fetch(&(at)->QuadPart, (LONGLONG)(value)))
PVOID NdisAllocateMemoryWithTagPriority(NDIS_HANDLE, UINT, ULONG, EX_POOL_PRIORITY);
VOID NdisFreeMemoryWithTagPriority(NDIS_HANDLE, PVOID, ULONG);
VOID NdisFreeMemory(PVOID, UINT, UINT);

typedef struct {
    int Held;
    KIRQL OldIrql;
} NDIS_SPIN_LOCK, *PNDIS_SPIN_LOCK;
VOID NdisAllocateSpinLock(PNDIS_SPIN_LOCK);
VOID NdisFreeSpinLock(PNDIS_SPIN_LOCK);
VOID NdisAcquireSpinLock(PNDIS_SPIN_LOCK);
VOID NdisReleaseSpinLock(PNDIS_SPIN_LOCK);
VOID NdisDprAcquireSpinLock(PNDIS_SPIN_LOCK);
VOID NdisDprReleaseSpinLock(PNDIS_SPIN_LOCK);
PLIST_ENTRY NdisInterlockedInsertTailList(PLIST_ENTRY, PLIST_ENTRY, PNDIS_SPIN_LOCK);
PLIST_ENTRY NdisInterlockedRemoveHeadList(PLIST_ENTRY, PNDIS_SPIN_LOCK);

typedef struct _NDIS_RW_LOCK_EX NDIS_RW_LOCK_EX, *PNDIS_RW_LOCK_EX;
typedef struct {
    KIRQL OldIrql;
    UCHAR LockState, Flags;
} LOCK_STATE_EX, *PLOCK_STATE_EX;
#define NDIS_RWL_AT_DISPATCH_LEVEL 1
PNDIS_RW_LOCK_EX NdisAllocateRWLock(NDIS_HANDLE);
VOID NdisFreeRWLock(PNDIS_RW_LOCK_EX);
VOID NdisAcquireRWLockRead(PNDIS_RW_LOCK_EX, PLOCK_STATE_EX, UCHAR);
VOID NdisAcquireRWLockWrite(PNDIS_RW_LOCK_EX, PLOCK_STATE_EX, UCHAR);
VOID NdisReleaseRWLock(PNDIS_RW_LOCK_EX, PLOCK_STATE_EX);

#define NDIS_INIT_MUTEX(it) ndis_mutex_start(it)
#define NDIS_WAIT_FOR_MUTEX(it) ndis_mutex_take(it)
#define NDIS_RELEASE_MUTEX(it) ndis_mutex_release(it)
VOID ndis_mutex_start(PKMUTEX);
VOID ndis_mutex_take(PKMUTEX);
VOID ndis_mutex_release(PKMUTEX);

typedef struct {
    KEVENT Event;
} NDIS_EVENT, *PNDIS_EVENT;
VOID NdisInitializeEvent(PNDIS_EVENT);
VOID NdisSetEvent(PNDIS_EVENT);
VOID NdisResetEvent(PNDIS_EVENT);
BOOLEAN NdisWaitEvent(PNDIS_EVENT, UINT);
VOID NdisMSleep(ULONG);
VOID NdisStallExecution(ULONG);
VOID NdisGetCurrentSystemTime(PLARGE_INTEGER);
#define NDIS_CURRENT_IRQL() kmdf_irql()

typedef VOID NDIS_IO_WORKITEM(PVOID, NDIS_HANDLE);
typedef NDIS_IO_WORKITEM NDIS_IO_WORKITEM_FUNCTION;
NDIS_HANDLE NdisAllocateIoWorkItem(NDIS_HANDLE);
VOID NdisFreeIoWorkItem(NDIS_HANDLE);
VOID NdisQueueIoWorkItem(NDIS_HANDLE, NDIS_IO_WORKITEM *, PVOID);

/* Configuration. */

typedef enum {
    NdisParameterInteger,
    NdisParameterHexInteger,
    NdisParameterString
} NDIS_PARAMETER_TYPE;
typedef struct {
    NDIS_PARAMETER_TYPE ParameterType;
    union {
        ULONG IntegerData;
        NDIS_STRING StringData;
    } ParameterData;
} NDIS_CONFIGURATION_PARAMETER, *PNDIS_CONFIGURATION_PARAMETER;
typedef struct {
    NDIS_OBJECT_HEADER Header;
    NDIS_HANDLE NdisHandle;
    ULONG Flags;
} NDIS_CONFIGURATION_OBJECT, *PNDIS_CONFIGURATION_OBJECT;
#define NDIS_CONFIGURATION_OBJECT_REVISION_1 1
#define NDIS_SIZEOF_CONFIGURATION_OBJECT_REVISION_1 sizeof(NDIS_CONFIGURATION_OBJECT)
NDIS_STATUS NdisOpenConfigurationEx(PNDIS_CONFIGURATION_OBJECT, PNDIS_HANDLE);
VOID NdisOpenConfigurationKeyByName(PNDIS_STATUS, NDIS_HANDLE, PNDIS_STRING, PNDIS_HANDLE);
VOID NdisCloseConfiguration(NDIS_HANDLE);
VOID NdisReadConfiguration(PNDIS_STATUS, PNDIS_CONFIGURATION_PARAMETER *, NDIS_HANDLE, PNDIS_STRING,
                           NDIS_PARAMETER_TYPE);
VOID NdisReadNetworkAddress(PNDIS_STATUS, PVOID *, PUINT, NDIS_HANDLE);
VOID NdisInitializeString(PNDIS_STRING, PUCHAR);
VOID NdisInitUnicodeString(PNDIS_STRING, PCWSTR);
VOID NdisFreeString(NDIS_STRING);
VOID NdisWriteErrorLogEntry(NDIS_HANDLE, ULONG, ULONG, ...);
UINT NdisGetVersion(VOID);
ULONG NdisGroupActiveProcessorCount(USHORT);
#define NdisProcessorNumberToIndex(number) ((ULONG)(number).Number)
VOID NdisMGetDeviceProperty(NDIS_HANDLE, PDEVICE_OBJECT *, PDEVICE_OBJECT *, PDEVICE_OBJECT *,
                            PCM_RESOURCE_LIST *, PCM_RESOURCE_LIST *);

/* Device memory. The device has no ports. */

ULONG NdisMGetBusData(NDIS_HANDLE, ULONG, ULONG, PVOID, ULONG);
NDIS_STATUS NdisMMapIoSpace(PVOID *, NDIS_HANDLE, NDIS_PHYSICAL_ADDRESS, UINT);
VOID NdisMUnmapIoSpace(NDIS_HANDLE, PVOID, UINT);
NDIS_STATUS NdisMRegisterIoPortRange(PVOID *, NDIS_HANDLE, UINT, UINT);
VOID NdisMDeregisterIoPortRange(NDIS_HANDLE, UINT, UINT, PVOID);
#define NdisReadRegisterUchar(at, to) (*(to) = *(volatile UCHAR *)(at))
#define NdisReadRegisterUshort(at, to) (*(to) = *(volatile USHORT *)(at))
#define NdisReadRegisterUlong(at, to) (*(to) = *(volatile ULONG *)(at))
#define NdisWriteRegisterUchar(at, value) (*(volatile UCHAR *)(at) = (value))
#define NdisWriteRegisterUshort(at, value) (*(volatile USHORT *)(at) = (value))
#define NdisWriteRegisterUlong(at, value) (*(volatile ULONG *)(at) = (value))
#define NdisRawReadPortUchar(at, to) (*(to) = ndis_port(at))
#define NdisRawReadPortUshort(at, to) (*(to) = ndis_port(at))
#define NdisRawReadPortUlong(at, to) (*(to) = ndis_port(at))
#define NdisRawWritePortUchar(at, value) ((void)(value), (void)ndis_port(at))
#define NdisRawWritePortUshort(at, value) ((void)(value), (void)ndis_port(at))
#define NdisRawWritePortUlong(at, value) ((void)(value), (void)ndis_port(at))
/* Ends the machine. */
ULONG ndis_port(ULONG_PTR);
