/* WMI's library for miniports: vioscsi needs its declarations. No check uses WMI. */
#ifndef WINDRV_SCSIWMI_H
#define WINDRV_SCSIWMI_H
typedef struct {
    GUID const *Guid;
    ULONG InstanceCount, Flags;
} SCSIWMIGUIDREGINFO, *PSCSIWMIGUIDREGINFO;
typedef struct {
    PVOID UserContext;
    ULONG BufferSize;
    PUCHAR Buffer;
    UCHAR MinorFunction, ReturnStatus;
    ULONG ReturnSize;
} SCSIWMI_REQUEST_CONTEXT, *PSCSIWMI_REQUEST_CONTEXT;
typedef struct _SCSIWMILIB_CONTEXT {
    ULONG GuidCount;
    PSCSIWMIGUIDREGINFO GuidList;
    PVOID QueryWmiRegInfo, QueryWmiDataBlock, SetWmiDataBlock, SetWmiDataItem, ExecuteWmiMethod,
        WmiFunctionControl;
} SCSI_WMILIB_CONTEXT, *PSCSI_WMILIB_CONTEXT;
BOOLEAN ScsiPortWmiDispatchFunction(PSCSI_WMILIB_CONTEXT, UCHAR, PVOID, PSCSIWMI_REQUEST_CONTEXT,
                                    PVOID, ULONG, PVOID);
VOID ScsiPortWmiPostProcess(PSCSIWMI_REQUEST_CONTEXT, UCHAR, ULONG);
#define ScsiPortWmiGetReturnSize(context) ((context)->ReturnSize)
#define ScsiPortWmiGetReturnStatus(context) ((context)->ReturnStatus)
#endif
