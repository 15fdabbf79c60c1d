/* The part of the StorPort interface (Windows 10 and later) that viostor and vioscsi use. SCSI's
 * own names come from mingw-w64's scsi.h; its srb.h and storport.h date from Windows XP and
 * are not included. Names and meanings follow Microsoft's documentation. */
#ifndef WINDRV_STORPORT_H
#define WINDRV_STORPORT_H

#define _NTSRB_
#include <scsi.h>

#define SCSI_MAXIMUM_LUNS_PER_TARGET 255
#define SCSI_MINIMUM_PHYSICAL_BREAKS 16
#define SCSI_DMA64_MINIPORT_SUPPORTED 0x01
#define SCSI_DMA64_MINIPORT_FULL64BIT_SUPPORTED 0x02
#define SCSI_DMA64_SYSTEM_SUPPORTED 0x80
#define SP_UNINITIALIZED_VALUE ((ULONG)~0)
#define SP_UNTAGGED ((UCHAR)~0)

enum { STOR_MAP_NO_BUFFERS, STOR_MAP_ALL_BUFFERS, STOR_MAP_NON_READ_WRITE_BUFFERS };
typedef enum { StorSynchronizeHalfDuplex, StorSynchronizeFullDuplex } STOR_SYNCHRONIZATION_MODEL;
typedef enum {
    InterruptSupportNone,
    InterruptSynchronizeAll,
    InterruptSynchronizePerMessage
} INTERRUPT_SYNCHRONIZATION_MODE;

#define SRB_FUNCTION_EXECUTE_SCSI 0x00
#define SRB_FUNCTION_IO_CONTROL 0x02
#define SRB_FUNCTION_SHUTDOWN 0x07
#define SRB_FUNCTION_FLUSH 0x08
#define SRB_FUNCTION_ABORT_COMMAND 0x10
#define SRB_FUNCTION_RESET_BUS 0x12
#define SRB_FUNCTION_RESET_DEVICE 0x13
#define SRB_FUNCTION_WMI 0x17
#define SRB_FUNCTION_RESET_LOGICAL_UNIT 0x20
#define SRB_FUNCTION_POWER 0x24
#define SRB_FUNCTION_PNP 0x25
#define SRB_FUNCTION_DUMP_POINTERS 0x26
#define SRB_FUNCTION_FREE_DUMP_POINTERS 0x27
#define SRB_FUNCTION_STORAGE_REQUEST_BLOCK 0x28

#define SRB_STATUS_PENDING 0x00
#define SRB_STATUS_SUCCESS 0x01
#define SRB_STATUS_ABORTED 0x02
#define SRB_STATUS_ERROR 0x04
#define SRB_STATUS_BUSY 0x05
#define SRB_STATUS_INVALID_REQUEST 0x06
#define SRB_STATUS_INVALID_PATH_ID 0x07
#define SRB_STATUS_NO_DEVICE 0x08
#define SRB_STATUS_TIMEOUT 0x09
#define SRB_STATUS_BUS_RESET 0x0E
#define SRB_STATUS_DATA_OVERRUN 0x12
#define SRB_STATUS_BAD_SRB_BLOCK_LENGTH 0x15
#define SRB_STATUS_INVALID_LUN 0x20
#define SRB_STATUS_INVALID_TARGET_ID 0x21
#define SRB_STATUS_BAD_FUNCTION 0x22
#define SRB_STATUS_QUEUE_FROZEN 0x40
#define SRB_STATUS_AUTOSENSE_VALID 0x80
#define SRB_STATUS(status) ((status) & ~(SRB_STATUS_AUTOSENSE_VALID | SRB_STATUS_QUEUE_FROZEN))

#define SRB_FLAGS_QUEUE_ACTION_ENABLE 0x00000002
#define SRB_FLAGS_DISABLE_AUTOSENSE 0x00000020
#define SRB_FLAGS_DATA_IN 0x00000040
#define SRB_FLAGS_DATA_OUT 0x00000080
#define SRB_FLAGS_NO_DATA_TRANSFER 0
#define SRB_WMI_FLAGS_ADAPTER_REQUEST 0x01
#define SRB_PNP_FLAGS_ADAPTER_REQUEST 0x01
#define SRB_SIMPLE_TAG_REQUEST 0x20

#define SRB_TYPE_FLAG_SCSI_REQUEST_BLOCK 1
#define SRB_TYPE_FLAG_STORAGE_REQUEST_BLOCK 2
#define ADDRESS_TYPE_FLAG_BTL8 1
#define SRB_SIGNATURE 0x53524258
#define STORAGE_REQUEST_BLOCK_VERSION_1 1

#define SP_INTERNAL_ADAPTER_ERROR 6
#define SP_RETURN_NOT_FOUND 0
#define SP_RETURN_FOUND 1
#define SP_RETURN_ERROR 2
#define SP_RETURN_BAD_CONFIG 3

#define STOR_STATUS_SUCCESS 0
#define STOR_STATUS_UNSUCCESSFUL 0xC1000001L
#define STOR_STATUS_NOT_IMPLEMENTED 0xC1000002L
#define STOR_STATUS_INSUFFICIENT_RESOURCES 0xC1000003L
#define STOR_STATUS_INVALID_PARAMETER 0xC1000005L

typedef PHYSICAL_ADDRESS SCSI_PHYSICAL_ADDRESS, STOR_PHYSICAL_ADDRESS;

typedef struct _ACCESS_RANGE {
    STOR_PHYSICAL_ADDRESS RangeStart;
    ULONG RangeLength;
    BOOLEAN RangeInMemory;
} ACCESS_RANGE, *PACCESS_RANGE;

typedef struct _SCSI_REQUEST_BLOCK {
    USHORT Length;
    UCHAR Function, SrbStatus, ScsiStatus, PathId, TargetId, Lun, QueueTag, QueueAction, CdbLength,
        SenseInfoBufferLength;
    ULONG SrbFlags, DataTransferLength, TimeOutValue;
    PVOID DataBuffer, SenseInfoBuffer;
    struct _SCSI_REQUEST_BLOCK *NextSrb;
    PVOID OriginalRequest, SrbExtension;
    ULONG InternalStatus, Reserved;
    UCHAR Cdb[16];
} SCSI_REQUEST_BLOCK, *PSCSI_REQUEST_BLOCK;

typedef struct _SCSI_WMI_REQUEST_BLOCK {
    USHORT Length;
    UCHAR Function, SrbStatus, WMISubFunction, PathId, TargetId, Lun, Reserved1, WMIFlags,
        Reserved2[2];
    ULONG SrbFlags, DataTransferLength, TimeOutValue;
    PVOID DataBuffer, DataPath;
} SCSI_WMI_REQUEST_BLOCK, *PSCSI_WMI_REQUEST_BLOCK;

typedef enum _STOR_PNP_ACTION {
    StorStartDevice = 0x0,
    StorRemoveDevice = 0x2,
    StorStopDevice = 0x4,
    StorQueryCapabilities = 0x9,
    StorQueryResourceRequirements = 0xB,
    StorFilterResourceRequirements = 0xD,
    StorSurpriseRemoval = 0x17
} STOR_PNP_ACTION;

typedef struct _SCSI_PNP_REQUEST_BLOCK {
    USHORT Length;
    UCHAR Function, SrbStatus, PnPSubFunction, PathId, TargetId, Lun;
    STOR_PNP_ACTION PnPAction;
    ULONG SrbFlags, DataTransferLength, TimeOutValue;
    PVOID DataBuffer, SenseInfoBuffer;
    struct _SCSI_REQUEST_BLOCK *NextSrb;
    PVOID OriginalRequest, SrbExtension;
    ULONG SrbPnPFlags, Reserved;
} SCSI_PNP_REQUEST_BLOCK, *PSCSI_PNP_REQUEST_BLOCK;

typedef struct _STOR_DEVICE_CAPABILITIES {
    USHORT Version;
    ULONG DeviceD1 : 1, DeviceD2 : 1, LockSupported : 1, EjectSupported : 1, Removable : 1,
        DockDevice : 1, UniqueID : 1, SilentInstall : 1, SurpriseRemovalOK : 1, NoDisplayInUI : 1;
} STOR_DEVICE_CAPABILITIES, *PSTOR_DEVICE_CAPABILITIES, *PSTOR_DEVICE_CAPABILITIES_EX;

typedef struct _STOR_ADDRESS {
    USHORT Type, Port;
    ULONG AddressLength;
    UCHAR AddressData[];
} STOR_ADDRESS, *PSTOR_ADDRESS;
#define STOR_ADDRESS_TYPE_BTL8 1
#define STOR_ADDR_BTL8_ADDRESS_LENGTH 4
typedef struct _STOR_ADDR_BTL8 {
    USHORT Type, Port;
    ULONG AddressLength;
    UCHAR Path, Target, Lun, Reserved;
} STOR_ADDR_BTL8, *PSTOR_ADDR_BTL8;

typedef struct _STORAGE_REQUEST_BLOCK {
    USHORT Length;
    UCHAR Function, SrbStatus, ReservedUchar1[4];
    ULONG Signature, Version, SrbLength, SrbFunction, SrbFlags, ReservedUlong1, RequestTag;
    USHORT RequestPriority, RequestAttribute;
    ULONG TimeOutValue, SystemStatus, ZeroGuard1, AddressOffset, NumSrbExData, DataTransferLength;
    PVOID DataBuffer, ZeroGuard2, OriginalRequest, ClassContext, PortContext, MiniportContext;
    struct _STORAGE_REQUEST_BLOCK *NextSrb;
    ULONG SrbExDataOffset[1];
} STORAGE_REQUEST_BLOCK, *PSTORAGE_REQUEST_BLOCK;

typedef enum _SRBEXDATATYPE {
    SrbExDataTypeUnknown,
    SrbExDataTypeBidirectional,
    SrbExDataTypeScsiCdb16 = 0x40,
    SrbExDataTypeScsiCdb32,
    SrbExDataTypeScsiCdbVar,
    SrbExDataTypeWmi = 0x60,
    SrbExDataTypePower,
    SrbExDataTypePnP,
    SrbExDataTypeIoInfo = 0x80
} SRBEXDATATYPE;
typedef struct _SRBEX_DATA {
    SRBEXDATATYPE Type;
    ULONG Length;
    UCHAR Data[];
} SRBEX_DATA, *PSRBEX_DATA;
typedef struct _SRBEX_DATA_SCSI_CDB16 {
    SRBEXDATATYPE Type;
    ULONG Length;
    UCHAR ScsiStatus, SenseInfoBufferLength, CdbLength, Reserved;
    ULONG Reserved1;
    PVOID SenseInfoBuffer;
    UCHAR Cdb[16];
} SRBEX_DATA_SCSI_CDB16, *PSRBEX_DATA_SCSI_CDB16;
typedef struct _SRBEX_DATA_WMI {
    SRBEXDATATYPE Type;
    ULONG Length;
    UCHAR WMISubFunction, WMIFlags, Reserved[2];
    ULONG Reserved1;
    PVOID DataPath;
} SRBEX_DATA_WMI, *PSRBEX_DATA_WMI;
typedef struct _SRBEX_DATA_PNP {
    SRBEXDATATYPE Type;
    ULONG Length;
    UCHAR PnPSubFunction, Reserved[3];
    STOR_PNP_ACTION PnPAction;
    ULONG SrbPnPFlags, Reserved1;
} SRBEX_DATA_PNP, *PSRBEX_DATA_PNP;

typedef struct _STOR_SCATTER_GATHER_ELEMENT {
    STOR_PHYSICAL_ADDRESS PhysicalAddress;
    ULONG Length;
    ULONG_PTR Reserved;
} STOR_SCATTER_GATHER_ELEMENT, *PSTOR_SCATTER_GATHER_ELEMENT;
typedef struct _STOR_SCATTER_GATHER_LIST {
    ULONG NumberOfElements;
    ULONG_PTR Reserved;
    STOR_SCATTER_GATHER_ELEMENT List[];
} STOR_SCATTER_GATHER_LIST, *PSTOR_SCATTER_GATHER_LIST;

typedef enum _SCSI_ADAPTER_CONTROL_TYPE {
    ScsiQuerySupportedControlTypes,
    ScsiStopAdapter,
    ScsiRestartAdapter,
    ScsiSetBootConfig,
    ScsiSetRunningConfig,
    ScsiPowerSettingNotification,
    ScsiAdapterPower,
    ScsiAdapterPoFxPowerRequired,
    ScsiAdapterPoFxPowerActive,
    ScsiAdapterPoFxPowerSetFState,
    ScsiAdapterPoFxPowerControl,
    ScsiAdapterPrepareForBusReScan,
    ScsiAdapterSystemPowerHints,
    ScsiAdapterFilterResourceRequirements,
    ScsiAdapterPoFxMaxOperationalPower,
    ScsiAdapterPoFxSetPerfState,
    ScsiAdapterSurpriseRemoval,
    ScsiAdapterSerialNumber,
    ScsiAdapterCryptoOperation,
    ScsiAdapterQueryFruId,
    ScsiAdapterSetEventLogging,
    ScsiAdapterControlMax
} SCSI_ADAPTER_CONTROL_TYPE;
typedef enum {
    ScsiAdapterControlSuccess,
    ScsiAdapterControlUnsuccessful
} SCSI_ADAPTER_CONTROL_STATUS;
typedef enum _SCSI_UNIT_CONTROL_TYPE {
    ScsiQuerySupportedUnitControlTypes,
    ScsiUnitUsage,
    ScsiUnitStart,
    ScsiUnitPower,
    ScsiUnitPoFxPowerInfo,
    ScsiUnitPoFxPowerRequired,
    ScsiUnitPoFxPowerActive,
    ScsiUnitPoFxPowerSetFState,
    ScsiUnitPoFxPowerControl,
    ScsiUnitRemove,
    ScsiUnitSurpriseRemoval,
    ScsiUnitRichDescription,
    ScsiUnitQueryBusType,
    ScsiUnitQueryFruId,
    ScsiUnitReportInternalData,
    ScsiUnitKsr,
    ScsiUnitControlMax
} SCSI_UNIT_CONTROL_TYPE;
typedef enum { ScsiUnitControlSuccess, ScsiUnitControlUnsuccessful } SCSI_UNIT_CONTROL_STATUS;
typedef struct _SCSI_SUPPORTED_CONTROL_TYPE_LIST {
    ULONG MaxControlType;
    BOOLEAN SupportedTypeList[];
} SCSI_SUPPORTED_CONTROL_TYPE_LIST, *PSCSI_SUPPORTED_CONTROL_TYPE_LIST;

typedef struct _MEMORY_REGION {
    PUCHAR VirtualBase;
    PHYSICAL_ADDRESS PhysicalBase;
    ULONG Length;
} MEMORY_REGION;

typedef BOOLEAN HW_INITIALIZE(PVOID DeviceExtension), HW_INTERRUPT(PVOID DeviceExtension),
    HW_PASSIVE_INITIALIZE_ROUTINE(PVOID DeviceExtension),
    HW_STARTIO(PVOID DeviceExtension, PSCSI_REQUEST_BLOCK Srb),
    HW_BUILDIO(PVOID DeviceExtension, PSCSI_REQUEST_BLOCK Srb),
    HW_RESET_BUS(PVOID DeviceExtension, ULONG PathId),
    HW_MESSAGE_SIGNALED_INTERRUPT_ROUTINE(PVOID DeviceExtension, ULONG MessageId),
    STOR_SYNCHRONIZED_ACCESS(PVOID DeviceExtension, PVOID Context);
typedef SCSI_ADAPTER_CONTROL_STATUS HW_ADAPTER_CONTROL(PVOID, SCSI_ADAPTER_CONTROL_TYPE, PVOID);
typedef SCSI_UNIT_CONTROL_STATUS HW_UNIT_CONTROL(PVOID, SCSI_UNIT_CONTROL_TYPE, PVOID);
typedef ULONG sp_DRIVER_INITIALIZE(PVOID DriverObject, PVOID RegistryPath);

typedef struct _PORT_CONFIGURATION_INFORMATION {
    ULONG Length, SystemIoBusNumber;
    INTERFACE_TYPE AdapterInterfaceType;
    ULONG BusInterruptLevel, BusInterruptVector;
    KINTERRUPT_MODE InterruptMode;
    ULONG MaximumTransferLength, NumberOfPhysicalBreaks, DmaChannel, DmaPort;
    DMA_WIDTH DmaWidth;
    DMA_SPEED DmaSpeed;
    ULONG AlignmentMask, NumberOfAccessRanges;
    ACCESS_RANGE (*AccessRanges)[];
    PVOID MiniportDumpData;
    UCHAR NumberOfBuses;
    CCHAR InitiatorBusId[8];
    BOOLEAN ScatterGather, Master, CachesData, AdapterScansDown, AtdiskPrimaryClaimed,
        AtdiskSecondaryClaimed, Dma32BitAddresses, DemandMode;
    UCHAR MapBuffers;
    BOOLEAN NeedPhysicalAddresses, TaggedQueuing, AutoRequestSense, MultipleRequestPerLu,
        ReceiveEvent, RealModeInitialized, BufferAccessScsiPortControlled;
    UCHAR MaximumNumberOfTargets, SrbType, AddressType;
    ULONG SlotNumber, BusInterruptLevel2, BusInterruptVector2;
    KINTERRUPT_MODE InterruptMode2;
    ULONG DmaChannel2, DmaPort2;
    DMA_WIDTH DmaWidth2;
    DMA_SPEED DmaSpeed2;
    ULONG DeviceExtensionSize, SpecificLuExtensionSize, SrbExtensionSize;
    UCHAR Dma64BitAddresses;
    BOOLEAN ResetTargetSupported;
    UCHAR MaximumNumberOfLogicalUnits;
    BOOLEAN WmiDataProvider;
    STOR_SYNCHRONIZATION_MODEL SynchronizationModel;
    HW_MESSAGE_SIGNALED_INTERRUPT_ROUTINE *HwMSInterruptRoutine;
    INTERRUPT_SYNCHRONIZATION_MODE InterruptSynchronizationMode;
    MEMORY_REGION DumpRegion;
    ULONG RequestedDumpBufferSize;
    BOOLEAN VirtualDevice;
    UCHAR DumpMode, DmaAddressWidth;
    ULONG ExtendedFlags1, MaxNumberOfIO, MaxIOsPerLun, InitialLunQueueDepth, BusResetHoldTime,
        FeatureSupport;
} PORT_CONFIGURATION_INFORMATION, *PPORT_CONFIGURATION_INFORMATION;

typedef ULONG HW_FIND_ADAPTER(PVOID DeviceExtension, PVOID HwContext, PVOID BusInformation,
                              PCHAR ArgumentString, PPORT_CONFIGURATION_INFORMATION,
                              PBOOLEAN Again);

typedef struct _HW_INITIALIZATION_DATA {
    ULONG HwInitializationDataSize;
    INTERFACE_TYPE AdapterInterfaceType;
    HW_INITIALIZE *HwInitialize;
    HW_STARTIO *HwStartIo;
    HW_INTERRUPT *HwInterrupt;
    HW_FIND_ADAPTER *HwFindAdapter;
    HW_RESET_BUS *HwResetBus;
    PVOID HwDmaStarted, HwAdapterState;
    ULONG DeviceExtensionSize, SpecificLuExtensionSize, SrbExtensionSize, NumberOfAccessRanges;
    PVOID Reserved;
    UCHAR MapBuffers;
    BOOLEAN NeedPhysicalAddresses, TaggedQueuing, AutoRequestSense, MultipleRequestPerLu,
        ReceiveEvent;
    USHORT VendorIdLength;
    PVOID VendorId;
    USHORT PortVersionFlags, DeviceIdLength;
    PVOID DeviceId;
    HW_ADAPTER_CONTROL *HwAdapterControl;
    HW_BUILDIO *HwBuildIo;
    PVOID HwFreeAdapterResources, HwProcessServiceRequest, HwCompleteServiceIrp,
        HwInitializeTracing, HwCleanupTracing, HwTracingEnabled;
    ULONG FeatureSupport, SrbTypeFlags, AddressTypeFlags, Reserved1;
    HW_UNIT_CONTROL *HwUnitControl;
} HW_INITIALIZATION_DATA, *PHW_INITIALIZATION_DATA;

typedef enum _SCSI_NOTIFICATION_TYPE {
    RequestComplete,
    NextRequest,
    NextLuRequest,
    ResetDetected,
    CallDisableInterrupts,
    CallEnableInterrupts,
    RequestTimerCall,
    BusChangeDetected,
    WMIEvent,
    WMIReregister
} SCSI_NOTIFICATION_TYPE;

/* DPCs and locks. Their contents belong to the port driver: a miniport only passes them back. */
struct _STOR_DPC;
typedef VOID HW_DPC_ROUTINE(struct _STOR_DPC *Dpc, PVOID HwDeviceExtension, PVOID Argument1,
                            PVOID Argument2);
typedef struct _STOR_DPC {
    HW_DPC_ROUTINE *Routine;
    PVOID Context, Argument1, Argument2;
    struct _STOR_DPC *Next;
    ULONG Queued, Mark;
    int Locked;
    UCHAR Padding[64]; /* KDPC and KSPIN_LOCK are longer */
} STOR_DPC, *PSTOR_DPC;
typedef enum _STOR_SPINLOCK {
    DpcLock = 1,
    StartIoLock,
    InterruptLock,
    ThreadedDpcLock
} STOR_SPINLOCK;
typedef struct _STOR_LOCK_HANDLE {
    STOR_SPINLOCK Lock;
    struct {
        PVOID Lock;
        KIRQL OldIrql;
    } Context;
} STOR_LOCK_HANDLE, *PSTOR_LOCK_HANDLE;

typedef struct _MESSAGE_INTERRUPT_INFORMATION {
    ULONG MessageId, MessageData;
    STOR_PHYSICAL_ADDRESS MessageAddress;
    ULONG InterruptVector, InterruptLevel;
    KINTERRUPT_MODE InterruptMode;
} MESSAGE_INTERRUPT_INFORMATION, *PMESSAGE_INTERRUPT_INFORMATION;

#define STOR_PERF_VERSION 6
#define STOR_PERF_DPC_REDIRECTION 0x01
#define STOR_PERF_CONCURRENT_CHANNELS 0x02
#define STOR_PERF_INTERRUPT_MESSAGE_RANGES 0x04
#define STOR_PERF_ADV_CONFIG_LOCALITY 0x08
#define STOR_PERF_OPTIMIZE_FOR_COMPLETION_DURING_STARTIO 0x10
#define STOR_PERF_DPC_REDIRECTION_CURRENT_CPU 0x20
#define STOR_PERF_NO_SGL 0x40
typedef struct _PERF_CONFIGURATION_DATA {
    ULONG Version, Size, Flags, ConcurrentChannels, FirstRedirectionMessageNumber,
        LastRedirectionMessageNumber, DeviceNode, Reserved;
    PGROUP_AFFINITY MessageTargets;
} PERF_CONFIGURATION_DATA, *PPERF_CONFIGURATION_DATA;
typedef struct _STARTIO_PERFORMANCE_PARAMETERS {
    ULONG Version, Size, MessageNumber, ChannelNumber;
} STARTIO_PERFORMANCE_PARAMETERS, *PSTARTIO_PERFORMANCE_PARAMETERS;

typedef union _STOR_UNIT_ATTRIBUTES {
    struct {
        ULONG DeviceAttentionSupported : 1, AsyncNotificationSupported : 1, D3ColdNotSupported : 1,
            BypassQueueSupported : 1, Reserved : 28;
    };
    ULONG AsULONG;
} STOR_UNIT_ATTRIBUTES;
#define STATE_CHANGE_LUN 1
#define STATE_CHANGE_TARGET 2
#define STATE_CHANGE_BUS 4

typedef enum {
    StorEventAdapterAssociation,
    StorEventLunAssociation,
    StorEventTargetAssociation
} STOR_EVENT_ASSOCIATION_ENUM;
#define STOR_CURRENT_LOG_INTERFACE_REVISION 1
typedef struct _STOR_LOG_EVENT_DETAILS {
    ULONG InterfaceRevision, Size, Flags;
    STOR_EVENT_ASSOCIATION_ENUM EventAssociation;
    ULONG PathId, TargetId, LunId;
    BOOLEAN StorportSpecificErrorCode;
    ULONG ErrorCode, UniqueId, DumpDataSize;
    PVOID DumpData;
    ULONG StringCount;
    PWSTR *StringList;
} STOR_LOG_EVENT_DETAILS, *PSTOR_LOG_EVENT_DETAILS;

#define MINIPORT_REG_DWORD 4

/* The exports of storport.sys. */
ULONG StorPortInitialize(PVOID, PVOID, PHW_INITIALIZATION_DATA, PVOID);
ULONG StorPortGetBusData(PVOID, ULONG Type, ULONG Bus, ULONG Slot, PVOID Buffer, ULONG Length);
PVOID StorPortGetDeviceBase(PVOID, INTERFACE_TYPE, ULONG Bus, STOR_PHYSICAL_ADDRESS, ULONG Length,
                            BOOLEAN InIoSpace);
PVOID StorPortGetUncachedExtension(PVOID, PPORT_CONFIGURATION_INFORMATION, ULONG Length);
STOR_PHYSICAL_ADDRESS StorPortGetPhysicalAddress(PVOID, PSCSI_REQUEST_BLOCK, PVOID, ULONG *Length);
PSTOR_SCATTER_GATHER_LIST StorPortGetScatterGatherList(PVOID, PSCSI_REQUEST_BLOCK);
VOID StorPortNotification(SCSI_NOTIFICATION_TYPE, PVOID, ...);
ULONG StorPortExtendedFunction(ULONG Function, PVOID, ...);
VOID StorPortStallExecution(ULONG Microseconds);
VOID StorPortMoveMemory(PVOID To, const VOID *From, ULONG_PTR Length);
#define StorPortCopyMemory(to, from, length) StorPortMoveMemory((to), (from), (length))
BOOLEAN StorPortBusy(PVOID, ULONG RequestsToComplete);
BOOLEAN StorPortPause(PVOID, ULONG Seconds);
BOOLEAN StorPortResume(PVOID);
BOOLEAN StorPortSetDeviceQueueDepth(PVOID, UCHAR Path, UCHAR Target, UCHAR Lun, ULONG Depth);
BOOLEAN StorPortSynchronizeAccess(PVOID, STOR_SYNCHRONIZED_ACCESS *, PVOID Context);
PUCHAR StorPortAllocateRegistryBuffer(PVOID, PULONG Length);
VOID StorPortFreeRegistryBuffer(PVOID, PUCHAR);
BOOLEAN StorPortRegistryRead(PVOID, PUCHAR Name, ULONG Global, ULONG Type, PUCHAR Buffer,
                             PULONG Length);
UCHAR StorPortReadPortUchar(PVOID, PUCHAR);
USHORT StorPortReadPortUshort(PVOID, PUSHORT);
ULONG StorPortReadPortUlong(PVOID, PULONG);
VOID StorPortWritePortUchar(PVOID, PUCHAR, UCHAR);
VOID StorPortWritePortUshort(PVOID, PUSHORT, USHORT);
VOID StorPortWritePortUlong(PVOID, PULONG, ULONG);
UCHAR StorPortReadRegisterUchar(PVOID, PUCHAR);
USHORT StorPortReadRegisterUshort(PVOID, PUSHORT);
ULONG StorPortReadRegisterUlong(PVOID, PULONG);
VOID StorPortWriteRegisterUchar(PVOID, PUCHAR, UCHAR);
VOID StorPortWriteRegisterUshort(PVOID, PUSHORT, USHORT);
VOID StorPortWriteRegisterUlong(PVOID, PULONG, ULONG);

/* As in Microsoft's header these are inline and end in one export. */
typedef enum _STORPORT_FUNCTION_CODE {
    ExtFunctionAllocatePool,
    ExtFunctionFreePool,
    ExtFunctionAllocateMdl,
    ExtFunctionFreeMdl,
    ExtFunctionBuildMdlForNonPagedPool,
    ExtFunctionGetSystemAddress,
    ExtFunctionGetOriginalMdl,
    ExtFunctionCompleteServiceIrp,
    ExtFunctionGetDeviceObjects,
    ExtFunctionBuildScatterGatherList,
    ExtFunctionPutScatterGatherList,
    ExtFunctionAcquireMSISpinLock,
    ExtFunctionReleaseMSISpinLock,
    ExtFunctionGetMessageInterruptInformation,
    ExtFunctionInitializePerformanceOptimizations,
    ExtFunctionGetStartIoPerformanceParameters,
    ExtFunctionLogSystemEvent,
    ExtFunctionQueryPerformanceCounter = 0x28,
    ExtFunctionStateChangeDetected = 0x30,
    ExtFunctionSetUnitAttributes = 0x38,
    ExtFunctionEnablePassiveInitialization = 0x1000,
    ExtFunctionInitializeDpc,
    ExtFunctionIssueDpc,
    ExtFunctionAcquireSpinLock,
    ExtFunctionReleaseSpinLock
} STORPORT_FUNCTION_CODE;
#define StorPortAllocatePool(e, size, tag, to)                                                     \
    StorPortExtendedFunction(ExtFunctionAllocatePool, (e), (SIZE_T)(size), (ULONG)(tag), (to))
#define StorPortFreePool(e, at) StorPortExtendedFunction(ExtFunctionFreePool, (e), (at))
#define StorPortAcquireMSISpinLock(e, message, irql)                                               \
    StorPortExtendedFunction(ExtFunctionAcquireMSISpinLock, (e), (ULONG)(message), (irql))
#define StorPortReleaseMSISpinLock(e, message, irql)                                               \
    StorPortExtendedFunction(ExtFunctionReleaseMSISpinLock, (e), (ULONG)(message), (ULONG)(irql))
#define StorPortGetMSIInfo(e, message, to)                                                         \
    StorPortExtendedFunction(ExtFunctionGetMessageInterruptInformation, (e), (ULONG)(message), (to))
#define StorPortInitializePerfOpts(e, query, data)                                                 \
    StorPortExtendedFunction(ExtFunctionInitializePerformanceOptimizations, (e), (int)(query),     \
                             (data))
#define StorPortGetStartIoPerfParams(e, srb, to)                                                   \
    StorPortExtendedFunction(ExtFunctionGetStartIoPerformanceParameters, (e), (srb), (to))
#define StorPortLogSystemEvent(e, details, size)                                                   \
    StorPortExtendedFunction(ExtFunctionLogSystemEvent, (e), (details), (PVOID)(size))
#define StorPortQueryPerformanceCounter(e, frequency, counter)                                     \
    StorPortExtendedFunction(ExtFunctionQueryPerformanceCounter, (e), (PVOID)(frequency), (counter))
#define StorPortStateChangeDetected(e, what, address, attributes, routine, context)                \
    StorPortExtendedFunction(ExtFunctionStateChangeDetected, (e), (ULONG)(what), (address))
#define StorPortSetUnitAttributes(e, address, attributes)                                          \
    StorPortExtendedFunction(ExtFunctionSetUnitAttributes, (e), (address),                         \
                             (ULONG)((attributes).AsULONG))
#define StorPortEnablePassiveInitialization(e, routine)                                            \
    ((BOOLEAN)StorPortExtendedFunction(ExtFunctionEnablePassiveInitialization, (e),                \
                                       (HW_PASSIVE_INITIALIZE_ROUTINE *)(routine)))
#define StorPortInitializeDpc(e, dpc, routine)                                                     \
    StorPortExtendedFunction(ExtFunctionInitializeDpc, (e), (PSTOR_DPC)(dpc),                      \
                             (HW_DPC_ROUTINE *)(routine))
#define StorPortIssueDpc(e, dpc, one, two)                                                         \
    ((BOOLEAN)StorPortExtendedFunction(ExtFunctionIssueDpc, (e), (PSTOR_DPC)(dpc), (PVOID)(one),   \
                                       (PVOID)(two)))
#define StorPortAcquireSpinLock(e, lock, context, handle)                                          \
    StorPortExtendedFunction(ExtFunctionAcquireSpinLock, (e), (int)(lock), (PVOID)(context),       \
                             (handle))
#define StorPortReleaseSpinLock(e, handle)                                                         \
    StorPortExtendedFunction(ExtFunctionReleaseSpinLock, (e), (handle))

#endif
