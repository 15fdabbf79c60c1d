/* In place of NetKVM's ParaNdis_Protocol.cpp: without a second adapter of the same address, to
 * which it would hand over, the driver's protocol does nothing. */
#include "ParaNdis_Protocol.h"

NDIS_STATUS ParaNdis_ProtocolInitialize(NDIS_HANDLE)
{
    return NDIS_STATUS_SUCCESS;
}

void ParaNdis_ProtocolRegisterAdapter(PARANDIS_ADAPTER *)
{
}

void ParaNdis_ProtocolUnregisterAdapter(PARANDIS_ADAPTER *, bool)
{
}

bool ParaNdis_ProtocolSend(PARANDIS_ADAPTER *, PNET_BUFFER_LIST)
{
    return false;
}

void ParaNdis_ProtocolReturnNbls(PARANDIS_ADAPTER *, PNET_BUFFER_LIST, ULONG, ULONG)
{
}

void ParaNdis_PropagateOid(PARANDIS_ADAPTER *, NDIS_OID, PVOID, UINT)
{
}
