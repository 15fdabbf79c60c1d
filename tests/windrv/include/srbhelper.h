/* Accessors of both kinds of SRB: SCSI_REQUEST_BLOCK and STORAGE_REQUEST_BLOCK. */
#ifndef WINDRV_SRBHELPER_H
#define WINDRV_SRBHELPER_H
#include <storport.h>

static __inline BOOLEAN srb_is_extended(const VOID *srb)
{
    return ((const STORAGE_REQUEST_BLOCK *)srb)->Function == SRB_FUNCTION_STORAGE_REQUEST_BLOCK;
}
static __inline PSRBEX_DATA SrbGetSrbExDataByType(PSTORAGE_REQUEST_BLOCK srb, SRBEXDATATYPE type)
{
    if (!srb_is_extended(srb) || !srb->NumSrbExData || !srb->SrbExDataOffset[0])
        return NULL;
    PSRBEX_DATA data = (PSRBEX_DATA)((PUCHAR)srb + srb->SrbExDataOffset[0]);
    return data->Type == type ? data : NULL;
}
static __inline PSRBEX_DATA_SCSI_CDB16 srb_command(PVOID srb)
{
    return (PSRBEX_DATA_SCSI_CDB16)SrbGetSrbExDataByType((PSTORAGE_REQUEST_BLOCK)srb,
                                                         SrbExDataTypeScsiCdb16);
}
#define OF_BOTH(type, name, new_field, old_field)                                                  \
    static __inline type name(PVOID srb)                                                           \
    {                                                                                              \
        return srb_is_extended(srb) ? (type)((PSTORAGE_REQUEST_BLOCK)srb)->new_field               \
                                    : (type)((PSCSI_REQUEST_BLOCK)srb)->old_field;                 \
    }
OF_BOTH(ULONG, SrbGetSrbFunction, SrbFunction, Function)
OF_BOTH(ULONG, SrbGetSrbLength, SrbLength, Length)
OF_BOTH(ULONG, SrbGetSrbFlags, SrbFlags, SrbFlags)
OF_BOTH(PVOID, SrbGetMiniportContext, MiniportContext, SrbExtension)
OF_BOTH(PVOID, SrbGetDataBuffer, DataBuffer, DataBuffer)
OF_BOTH(ULONG, SrbGetDataTransferLength, DataTransferLength, DataTransferLength)
OF_BOTH(ULONG, SrbGetTimeOutValue, TimeOutValue, TimeOutValue)

static __inline UCHAR srb_address(PVOID srb, int which)
{
    PSTORAGE_REQUEST_BLOCK it = srb;
    if (!srb_is_extended(srb)) {
        PSCSI_REQUEST_BLOCK old = srb;
        return which == 0 ? old->PathId : which == 1 ? old->TargetId : old->Lun;
    }
    PSTOR_ADDR_BTL8 at = (PSTOR_ADDR_BTL8)((PUCHAR)srb + it->AddressOffset);
    return which == 0 ? at->Path : which == 1 ? at->Target : at->Lun;
}
#define SrbGetPathId(srb) srb_address((srb), 0)
#define SrbGetTargetId(srb) srb_address((srb), 1)
#define SrbGetLun(srb) srb_address((srb), 2)

static __inline VOID SrbSetDataTransferLength(PVOID srb, ULONG length)
{
    if (srb_is_extended(srb))
        ((PSTORAGE_REQUEST_BLOCK)srb)->DataTransferLength = length;
    else
        ((PSCSI_REQUEST_BLOCK)srb)->DataTransferLength = length;
}
static __inline VOID SrbSetSrbStatus(PVOID srb, UCHAR status)
{
    ((PSTORAGE_REQUEST_BLOCK)srb)->SrbStatus = status; /* the same place in both */
}
static __inline PCDB SrbGetCdb(PVOID srb)
{
    if (srb_is_extended(srb)) {
        PSRBEX_DATA_SCSI_CDB16 command = srb_command(srb);
        return command ? (PCDB)command->Cdb : NULL;
    }
    return (PCDB)((PSCSI_REQUEST_BLOCK)srb)->Cdb;
}
static __inline BOOLEAN SrbGetScsiData(PVOID srb, UCHAR *cdb_length, ULONG *cdb_length32,
                                       UCHAR *status, PVOID *sense, UCHAR *sense_length)
{
    PSRBEX_DATA_SCSI_CDB16 it = srb_command(srb);
    if (cdb_length)
        *cdb_length = it ? it->CdbLength : 0;
    if (cdb_length32)
        *cdb_length32 = 0;
    if (status)
        *status = it ? it->ScsiStatus : 0;
    if (sense)
        *sense = it ? it->SenseInfoBuffer : NULL;
    if (sense_length)
        *sense_length = it ? it->SenseInfoBufferLength : 0;
    return it != NULL;
}
static __inline VOID SrbSetScsiData(PVOID srb, UCHAR *cdb_length, ULONG *cdb_length32,
                                    UCHAR *status, PVOID *sense, UCHAR *sense_length)
{
    PSRBEX_DATA_SCSI_CDB16 it = srb_command(srb);
    (void)cdb_length, (void)cdb_length32, (void)sense, (void)sense_length;
    if (it && status)
        it->ScsiStatus = *status;
}
static __inline PVOID SrbGetSenseInfoBuffer(PVOID srb)
{
    PSRBEX_DATA_SCSI_CDB16 it = srb_command(srb);
    return it ? it->SenseInfoBuffer : NULL;
}
static __inline UCHAR SrbGetSenseInfoBufferLength(PVOID srb)
{
    PSRBEX_DATA_SCSI_CDB16 it = srb_command(srb);
    return it ? it->SenseInfoBufferLength : 0;
}
#endif
