/* KMDF's interface, as far as the drivers use it. The definitions are in kmdf/. */
#ifndef WINDRV_WDF_H
#define WINDRV_WDF_H
#include <ntddk.h>

typedef PVOID WDFOBJECT, WDFCONTEXT;
#define WDF_HANDLE(name) typedef struct name##_OBJECT *name
WDF_HANDLE(WDFDRIVER);
WDF_HANDLE(WDFDEVICE);
WDF_HANDLE(WDFQUEUE);
WDF_HANDLE(WDFREQUEST);
WDF_HANDLE(WDFINTERRUPT);
WDF_HANDLE(WDFSPINLOCK);
WDF_HANDLE(WDFCOLLECTION);
WDF_HANDLE(WDFDMAENABLER);
WDF_HANDLE(WDFDMATRANSACTION);
WDF_HANDLE(WDFCOMMONBUFFER);
WDF_HANDLE(WDFWORKITEM);
WDF_HANDLE(WDFCMRESLIST);
typedef struct Init WDFDEVICE_INIT, *PWDFDEVICE_INIT;
#define WDF_NO_HANDLE NULL
#define WDF_NO_OBJECT_ATTRIBUTES NULL
#define WDF_INVALID_HANDLE ((PVOID)(LONG_PTR) - 1)

typedef enum {
    WdfPowerDeviceD0 = 1,
    WdfPowerDeviceD1,
    WdfPowerDeviceD2,
    WdfPowerDeviceD3,
    WdfPowerDeviceD3Final,
} WDF_POWER_DEVICE_STATE;
typedef enum {
    WdfExecutionLevelInheritFromParent = 1,
    WdfExecutionLevelPassive,
    WdfExecutionLevelDispatch,
} WDF_EXECUTION_LEVEL;
typedef enum {
    WdfDeviceIoUndefined,
    WdfDeviceIoNeither,
    WdfDeviceIoBuffered,
    WdfDeviceIoDirect
} WDF_DEVICE_IO_TYPE;
typedef enum {
    WdfIoQueueDispatchSequential = 1,
    WdfIoQueueDispatchParallel,
    WdfIoQueueDispatchManual
} WDF_IO_QUEUE_DISPATCH_TYPE;
typedef enum {
    WdfRequestTypeRead = 3,
    WdfRequestTypeWrite = 4,
    WdfRequestTypeDeviceControl = 14
} WDF_REQUEST_TYPE;
enum {
    WdfRequestStopActionSuspend = 1,
    WdfRequestStopActionPurge = 2,
    WdfRequestStopRequestCancelable = 0x10000000
};
typedef enum { WdfDmaDirectionReadFromDevice, WdfDmaDirectionWriteToDevice } WDF_DMA_DIRECTION;
enum { WdfDmaProfileScatterGather64Duplex = 6 };

/* Objects and their contexts. */

typedef VOID EVT_WDF_OBJECT_CONTEXT_CLEANUP(WDFOBJECT);
typedef EVT_WDF_OBJECT_CONTEXT_CLEANUP EVT_WDF_OBJECT_CONTEXT_DESTROY,
    EVT_WDF_DEVICE_CONTEXT_CLEANUP;
typedef struct {
    const char *name;
    size_t size;
} WDF_CONTEXT_TYPE;
typedef enum { WdfSynchronizationScopeInherit = 1, WdfSynchronizationScopeDevice } WDF_SCOPE;
typedef struct {
    EVT_WDF_OBJECT_CONTEXT_CLEANUP *EvtCleanupCallback;
    EVT_WDF_OBJECT_CONTEXT_DESTROY *EvtDestroyCallback;
    WDF_EXECUTION_LEVEL ExecutionLevel;
    WDF_SCOPE SynchronizationScope;
    WDFOBJECT ParentObject;
    const WDF_CONTEXT_TYPE *ContextTypeInfo;
} WDF_OBJECT_ATTRIBUTES, *PWDF_OBJECT_ATTRIBUTES;
#define WDF_OBJECT_ATTRIBUTES_INIT(it) memset(it, 0, sizeof(WDF_OBJECT_ATTRIBUTES))
#define WDF_OBJECT_ATTRIBUTES_SET_CONTEXT_TYPE(it, type) ((it)->ContextTypeInfo = &type##_context)
#define WDF_OBJECT_ATTRIBUTES_INIT_CONTEXT_TYPE(it, type)                                          \
    (WDF_OBJECT_ATTRIBUTES_INIT(it), WDF_OBJECT_ATTRIBUTES_SET_CONTEXT_TYPE(it, type))
/* Each source has its own copy of the type: contexts are found by the name. */
#define WDF_DECLARE_CONTEXT_TYPE_WITH_NAME(type, accessor)                                         \
    static const WDF_CONTEXT_TYPE type##_context = {#type, sizeof(type)};                          \
    static __inline type *accessor(WDFOBJECT object)                                               \
    {                                                                                              \
        return WdfObjectGetContext(object, &type##_context);                                       \
    }
PVOID WdfObjectGetContext(WDFOBJECT, const WDF_CONTEXT_TYPE *);
NTSTATUS WdfObjectAllocateContext(WDFOBJECT, PWDF_OBJECT_ATTRIBUTES, PVOID *);
VOID WdfObjectDelete(WDFOBJECT);
VOID WdfObjectAcquireLock(WDFOBJECT);
VOID WdfObjectReleaseLock(WDFOBJECT);

/* Drivers and devices. */

typedef NTSTATUS EVT_WDF_DRIVER_DEVICE_ADD(WDFDRIVER, PWDFDEVICE_INIT);
typedef struct {
    EVT_WDF_DRIVER_DEVICE_ADD *EvtDriverDeviceAdd;
    ULONG DriverPoolTag;
} WDF_DRIVER_CONFIG, *PWDF_DRIVER_CONFIG;
#define WDF_DRIVER_CONFIG_INIT(it, add) (*(it) = (WDF_DRIVER_CONFIG){.EvtDriverDeviceAdd = (add)})
NTSTATUS WdfDriverCreate(PDRIVER_OBJECT, PUNICODE_STRING, PWDF_OBJECT_ATTRIBUTES,
                         PWDF_DRIVER_CONFIG, WDFDRIVER *);
#define WdfDriverWdmGetDriverObject(driver) NULL

typedef NTSTATUS EVT_WDF_DEVICE_PREPARE_HARDWARE(WDFDEVICE, WDFCMRESLIST, WDFCMRESLIST);
typedef NTSTATUS EVT_WDF_DEVICE_RELEASE_HARDWARE(WDFDEVICE, WDFCMRESLIST);
typedef NTSTATUS EVT_WDF_DEVICE_D0_ENTRY(WDFDEVICE, WDF_POWER_DEVICE_STATE);
typedef EVT_WDF_DEVICE_D0_ENTRY EVT_WDF_DEVICE_D0_ENTRY_POST_INTERRUPTS_ENABLED,
    EVT_WDF_DEVICE_D0_EXIT, EVT_WDF_DEVICE_D0_EXIT_PRE_INTERRUPTS_DISABLED;
typedef VOID EVT_WDF_DEVICE_SURPRISE_REMOVAL(WDFDEVICE);
typedef struct {
    EVT_WDF_DEVICE_PREPARE_HARDWARE *EvtDevicePrepareHardware;
    EVT_WDF_DEVICE_RELEASE_HARDWARE *EvtDeviceReleaseHardware;
    EVT_WDF_DEVICE_D0_ENTRY *EvtDeviceD0Entry;
    EVT_WDF_DEVICE_D0_ENTRY_POST_INTERRUPTS_ENABLED *EvtDeviceD0EntryPostInterruptsEnabled;
    EVT_WDF_DEVICE_D0_EXIT *EvtDeviceD0Exit;
    EVT_WDF_DEVICE_D0_EXIT_PRE_INTERRUPTS_DISABLED *EvtDeviceD0ExitPreInterruptsDisabled;
    EVT_WDF_DEVICE_SURPRISE_REMOVAL *EvtDeviceSurpriseRemoval;
} WDF_PNPPOWER_EVENT_CALLBACKS, *PWDF_PNPPOWER_EVENT_CALLBACKS;
#define WDF_PNPPOWER_EVENT_CALLBACKS_INIT(it) memset(it, 0, sizeof(WDF_PNPPOWER_EVENT_CALLBACKS))
VOID WdfDeviceInitSetPnpPowerEventCallbacks(PWDFDEVICE_INIT, PWDF_PNPPOWER_EVENT_CALLBACKS);
VOID WdfDeviceInitSetIoType(PWDFDEVICE_INIT, WDF_DEVICE_IO_TYPE);
NTSTATUS WdfDeviceCreate(PWDFDEVICE_INIT *, PWDF_OBJECT_ATTRIBUTES, WDFDEVICE *);
NTSTATUS WdfDeviceCreateDeviceInterface(WDFDEVICE, const GUID *, PCUNICODE_STRING);
ULONG WdfDeviceGetAlignmentRequirement(WDFDEVICE);
NTSTATUS WdfFdoQueryForInterface(WDFDEVICE, const GUID *, PINTERFACE, USHORT size, USHORT version,
                                 PVOID);
ULONG WdfCmResourceListGetCount(WDFCMRESLIST);
PCM_PARTIAL_RESOURCE_DESCRIPTOR WdfCmResourceListGetDescriptor(WDFCMRESLIST, ULONG);
typedef struct {
    const DEVPROPKEY *PropertyKey;
} WDF_DEVICE_PROPERTY_DATA;
#define WDF_DEVICE_PROPERTY_DATA_INIT(it, key) ((it)->PropertyKey = (key))
NTSTATUS WdfDeviceQueryPropertyEx(WDFDEVICE, WDF_DEVICE_PROPERTY_DATA *, ULONG, PVOID, PULONG,
                                  DEVPROPTYPE *);

/* Interrupts. */

typedef BOOLEAN EVT_WDF_INTERRUPT_ISR(WDFINTERRUPT, ULONG);
typedef VOID EVT_WDF_INTERRUPT_DPC(WDFINTERRUPT, WDFOBJECT);
typedef NTSTATUS EVT_WDF_INTERRUPT_ENABLE(WDFINTERRUPT, WDFDEVICE);
typedef EVT_WDF_INTERRUPT_ENABLE EVT_WDF_INTERRUPT_DISABLE;
typedef struct {
    EVT_WDF_INTERRUPT_ISR *EvtInterruptIsr;
    EVT_WDF_INTERRUPT_DPC *EvtInterruptDpc;
    EVT_WDF_INTERRUPT_ENABLE *EvtInterruptEnable;
    EVT_WDF_INTERRUPT_DISABLE *EvtInterruptDisable;
    BOOLEAN AutomaticSerialization;
} WDF_INTERRUPT_CONFIG, *PWDF_INTERRUPT_CONFIG;
#define WDF_INTERRUPT_CONFIG_INIT(it, isr, dpc)                                                    \
    (*(it) = (WDF_INTERRUPT_CONFIG){.EvtInterruptIsr = (isr), .EvtInterruptDpc = (dpc)})
typedef struct {
    BOOLEAN MessageSignaled;
    ULONG MessageNumber, Vector; /* the vector is 0 if the interrupt has none */
} WDF_INTERRUPT_INFO, *PWDF_INTERRUPT_INFO;
#define WDF_INTERRUPT_INFO_INIT(it) memset(it, 0, sizeof(WDF_INTERRUPT_INFO))
NTSTATUS WdfInterruptCreate(WDFDEVICE, PWDF_INTERRUPT_CONFIG, PWDF_OBJECT_ATTRIBUTES,
                            WDFINTERRUPT *);
WDFDEVICE WdfInterruptGetDevice(WDFINTERRUPT);
VOID WdfInterruptGetInfo(WDFINTERRUPT, PWDF_INTERRUPT_INFO);
BOOLEAN WdfInterruptQueueDpcForIsr(WDFINTERRUPT);

/* Queues and requests. */

typedef VOID EVT_WDF_IO_QUEUE_IO_READ(WDFQUEUE, WDFREQUEST, size_t);
typedef EVT_WDF_IO_QUEUE_IO_READ EVT_WDF_IO_QUEUE_IO_WRITE;
typedef VOID EVT_WDF_IO_QUEUE_IO_DEVICE_CONTROL(WDFQUEUE, WDFREQUEST, size_t output, size_t input,
                                                ULONG code);
typedef VOID EVT_WDF_IO_QUEUE_IO_STOP(WDFQUEUE, WDFREQUEST, ULONG);
typedef VOID EVT_WDF_REQUEST_CANCEL(WDFREQUEST);
typedef struct {
    WDF_IO_QUEUE_DISPATCH_TYPE DispatchType;
    BOOLEAN AllowZeroLengthRequests;
    EVT_WDF_IO_QUEUE_IO_READ *EvtIoRead;
    EVT_WDF_IO_QUEUE_IO_WRITE *EvtIoWrite;
    EVT_WDF_IO_QUEUE_IO_DEVICE_CONTROL *EvtIoDeviceControl;
    EVT_WDF_IO_QUEUE_IO_STOP *EvtIoStop;
} WDF_IO_QUEUE_CONFIG, *PWDF_IO_QUEUE_CONFIG;
#define WDF_IO_QUEUE_CONFIG_INIT(it, type) (*(it) = (WDF_IO_QUEUE_CONFIG){.DispatchType = (type)})
NTSTATUS WdfIoQueueCreate(WDFDEVICE, PWDF_IO_QUEUE_CONFIG, PWDF_OBJECT_ATTRIBUTES, WDFQUEUE *);
WDFDEVICE WdfIoQueueGetDevice(WDFQUEUE);
NTSTATUS WdfDeviceConfigureRequestDispatching(WDFDEVICE, WDFQUEUE, WDF_REQUEST_TYPE);
NTSTATUS WdfRequestRetrieveOutputBuffer(WDFREQUEST, size_t, PVOID *, size_t *);
NTSTATUS WdfRequestRetrieveInputBuffer(WDFREQUEST, size_t, PVOID *, size_t *);
VOID WdfRequestSetInformation(WDFREQUEST, ULONG_PTR);
ULONG_PTR WdfRequestGetInformation(WDFREQUEST);
NTSTATUS WdfRequestMarkCancelableEx(WDFREQUEST, EVT_WDF_REQUEST_CANCEL *);
NTSTATUS WdfRequestUnmarkCancelable(WDFREQUEST);
VOID WdfRequestStopAcknowledge(WDFREQUEST, BOOLEAN);
VOID WdfRequestComplete(WDFREQUEST, NTSTATUS);
VOID WdfRequestCompleteWithInformation(WDFREQUEST, NTSTATUS, ULONG_PTR);
WDFQUEUE WdfRequestGetIoQueue(WDFREQUEST);

/* Locks, collections, work items. */

NTSTATUS WdfSpinLockCreate(PWDF_OBJECT_ATTRIBUTES, WDFSPINLOCK *);
VOID WdfSpinLockAcquire(WDFSPINLOCK);
VOID WdfSpinLockRelease(WDFSPINLOCK);
NTSTATUS WdfCollectionCreate(PWDF_OBJECT_ATTRIBUTES, WDFCOLLECTION *);
NTSTATUS WdfCollectionAdd(WDFCOLLECTION, WDFOBJECT);
ULONG WdfCollectionGetCount(WDFCOLLECTION);
WDFOBJECT WdfCollectionGetItem(WDFCOLLECTION, ULONG);
VOID WdfCollectionRemove(WDFCOLLECTION, WDFOBJECT);
typedef VOID EVT_WDF_WORKITEM(WDFWORKITEM);
typedef struct {
    EVT_WDF_WORKITEM *EvtWorkItemFunc;
} WDF_WORKITEM_CONFIG, *PWDF_WORKITEM_CONFIG;
#define WDF_WORKITEM_CONFIG_INIT(it, function) ((it)->EvtWorkItemFunc = (function))
NTSTATUS WdfWorkItemCreate(PWDF_WORKITEM_CONFIG, PWDF_OBJECT_ATTRIBUTES, WDFWORKITEM *);
VOID WdfWorkItemEnqueue(WDFWORKITEM);
VOID WdfWorkItemFlush(WDFWORKITEM);
WDFOBJECT WdfWorkItemGetParentObject(WDFWORKITEM);

/* DMA. */

typedef struct {
    ULONG Profile;
    size_t MaximumLength;
} WDF_DMA_ENABLER_CONFIG;
#define WDF_DMA_ENABLER_CONFIG_INIT(it, profile, length)                                           \
    (*(it) = (WDF_DMA_ENABLER_CONFIG){profile, length})
NTSTATUS WdfDmaEnablerCreate(WDFDEVICE, WDF_DMA_ENABLER_CONFIG *, PWDF_OBJECT_ATTRIBUTES,
                             WDFDMAENABLER *);
NTSTATUS WdfCommonBufferCreate(WDFDMAENABLER, size_t, PWDF_OBJECT_ATTRIBUTES, WDFCOMMONBUFFER *);
PVOID WdfCommonBufferGetAlignedVirtualAddress(WDFCOMMONBUFFER);
PHYSICAL_ADDRESS WdfCommonBufferGetAlignedLogicalAddress(WDFCOMMONBUFFER);
typedef BOOLEAN EVT_WDF_PROGRAM_DMA(WDFDMATRANSACTION, WDFDEVICE, WDFCONTEXT, WDF_DMA_DIRECTION,
                                    PSCATTER_GATHER_LIST);
NTSTATUS WdfDmaTransactionCreate(WDFDMAENABLER, PWDF_OBJECT_ATTRIBUTES, WDFDMATRANSACTION *);
NTSTATUS WdfDmaTransactionInitialize(WDFDMATRANSACTION, EVT_WDF_PROGRAM_DMA *, WDF_DMA_DIRECTION,
                                     PMDL, PVOID, size_t);
NTSTATUS WdfDmaTransactionInitializeUsingRequest(WDFDMATRANSACTION, WDFREQUEST,
                                                 EVT_WDF_PROGRAM_DMA *, WDF_DMA_DIRECTION);
NTSTATUS WdfDmaTransactionInitializeUsingOffset(WDFDMATRANSACTION, EVT_WDF_PROGRAM_DMA *,
                                                WDF_DMA_DIRECTION, PMDL, ULONG_PTR, size_t);
NTSTATUS WdfDmaTransactionExecute(WDFDMATRANSACTION, PVOID);
BOOLEAN WdfDmaTransactionDmaCompletedFinal(WDFDMATRANSACTION, size_t, NTSTATUS *);

#include "wdf_bus.h"
#endif
