/* NDIS 6.85 as far as NetKVM uses it, for C and C++: what mingw-w64's ntddndis.h lacks. The
 * definitions of the functions are in tests/windrv/ndis/. */
#ifndef WINDRV_NDIS_H
#define WINDRV_NDIS_H
#define NDIS_SUPPORT_NDIS6 1
#define NDIS_SUPPORT_NDIS61 1
#define NDIS_SUPPORT_NDIS620 1
#define NDIS_SUPPORT_NDIS630 1
#define NDIS_SUPPORT_NDIS650 1
#define NDIS_SUPPORT_NDIS660 1
#define NDIS_SUPPORT_NDIS680 1
#define NDIS_SUPPORT_NDIS683 1
#define NDIS_SUPPORT_NDIS684 1
#define NDIS_SUPPORT_NDIS685 1
#define NDIS_MINIPORT_MAJOR_VERSION 6
#define NDIS_MINIPORT_MINOR_VERSION 85
#include "../ddk.h"
/* Socket addresses, which only other parts of ntddndis.h need. */
#define _WS2IPDEF_
typedef int SOCKADDR_INET;
typedef unsigned int UINT, *PUINT;
typedef unsigned long DWORD;

/* These structures have grown since. */
#define _NDIS_OFFLOAD old_NDIS_OFFLOAD_tag
#define NDIS_OFFLOAD old_NDIS_OFFLOAD
#define PNDIS_OFFLOAD old_PNDIS_OFFLOAD
#define _NDIS_OFFLOAD_PARAMETERS old_NDIS_OFFLOAD_PARAMETERS_tag
#define NDIS_OFFLOAD_PARAMETERS old_NDIS_OFFLOAD_PARAMETERS
#define PNDIS_OFFLOAD_PARAMETERS old_PNDIS_OFFLOAD_PARAMETERS
#define _NDIS_RECEIVE_SCALE_PARAMETERS old_NDIS_RECEIVE_SCALE_PARAMETERS_tag
#define NDIS_RECEIVE_SCALE_PARAMETERS old_NDIS_RECEIVE_SCALE_PARAMETERS
#define PNDIS_RECEIVE_SCALE_PARAMETERS old_PNDIS_RECEIVE_SCALE_PARAMETERS
#include <ntddndis.h>
#undef _NDIS_OFFLOAD
#undef NDIS_OFFLOAD
#undef PNDIS_OFFLOAD
#undef _NDIS_OFFLOAD_PARAMETERS
#undef NDIS_OFFLOAD_PARAMETERS
#undef PNDIS_OFFLOAD_PARAMETERS
#undef _NDIS_RECEIVE_SCALE_PARAMETERS
#undef NDIS_RECEIVE_SCALE_PARAMETERS
#undef PNDIS_RECEIVE_SCALE_PARAMETERS

#ifdef __cplusplus
extern "C" {
#endif

typedef PVOID NDIS_HANDLE, *PNDIS_HANDLE;
typedef int NDIS_STATUS, *PNDIS_STATUS;
typedef PHYSICAL_ADDRESS NDIS_PHYSICAL_ADDRESS, *PNDIS_PHYSICAL_ADDRESS;
typedef UNICODE_STRING NDIS_STRING, *PNDIS_STRING;
typedef CM_PARTIAL_RESOURCE_LIST NDIS_RESOURCE_LIST, *PNDIS_RESOURCE_LIST;
typedef USHORT NET_FRAME_TYPE;
#define NDIS_STRING_CONST(text)                                                                    \
    {                                                                                              \
        sizeof(L##text) - sizeof(WCHAR), sizeof(L##text), (PWSTR)L##text                           \
    }

#define NDIS_STATUS_SUCCESS ((NDIS_STATUS)STATUS_SUCCESS)
#define NDIS_STATUS_PENDING ((NDIS_STATUS)STATUS_PENDING)
#define NDIS_STATUS_NOT_ACCEPTED ((NDIS_STATUS)0x00010003)
#define NDIS_STATUS_LINK_STATE ((NDIS_STATUS)0x40010017)
#define NDIS_STATUS_OPER_STATUS ((NDIS_STATUS)0x40010023)
#define NDIS_STATUS_TASK_OFFLOAD_CURRENT_CONFIG ((NDIS_STATUS)0x40020006)
#define NDIS_STATUS_SOFT_ERRORS ((NDIS_STATUS)0x80010003)
#define NDIS_STATUS_FAILURE ((NDIS_STATUS)STATUS_UNSUCCESSFUL)
#define NDIS_STATUS_RESOURCES ((NDIS_STATUS)STATUS_INSUFFICIENT_RESOURCES)
#define NDIS_STATUS_NOT_SUPPORTED ((NDIS_STATUS)STATUS_NOT_SUPPORTED)
#define NDIS_STATUS_INVALID_PARAMETER ((NDIS_STATUS)STATUS_INVALID_PARAMETER)
#define NDIS_STATUS_INVALID_DEVICE_REQUEST ((NDIS_STATUS)STATUS_INVALID_DEVICE_REQUEST)
#define NDIS_STATUS_BUFFER_OVERFLOW ((NDIS_STATUS)STATUS_BUFFER_OVERFLOW)
#define NDIS_STATUS_ADAPTER_NOT_FOUND ((NDIS_STATUS)0xc0010006)
#define NDIS_STATUS_DEVICE_FAILED ((NDIS_STATUS)0xc0010008)
#define NDIS_STATUS_MULTICAST_FULL ((NDIS_STATUS)0xc0010009)
#define NDIS_STATUS_ADAPTER_NOT_OPEN ((NDIS_STATUS)0xc0010012)
#define NDIS_STATUS_INVALID_LENGTH ((NDIS_STATUS)0xc0010014)
#define NDIS_STATUS_INVALID_DATA ((NDIS_STATUS)0xc0010015)
#define NDIS_STATUS_BUFFER_TOO_SHORT ((NDIS_STATUS)0xc0010016)
#define NDIS_STATUS_INVALID_OID ((NDIS_STATUS)0xc0010017)
#define NDIS_STATUS_RESOURCE_CONFLICT ((NDIS_STATUS)0xc001001e)
#define NDIS_STATUS_MEDIA_DISCONNECTED ((NDIS_STATUS)0xc001001f)
#define NDIS_STATUS_SEND_ABORTED ((NDIS_STATUS)0xc0230004)
#define NDIS_STATUS_PAUSED ((NDIS_STATUS)0xc023002a)
#define NDIS_STATUS_LOW_POWER_STATE ((NDIS_STATUS)0xc023002f)
#define NDIS_STATUS_INDICATION_REQUIRED ((NDIS_STATUS)0x00230001)
#define NDIS_ERROR_CODE_OUT_OF_RESOURCES 0xc0001389
#define NDIS_ERROR_CODE_DRIVER_FAILURE 0xc000138d
#define NDIS_ERROR_CODE_UNSUPPORTED_CONFIGURATION 0xc00013ab

/* Lists of packets. */

typedef struct _NET_BUFFER {
    struct _NET_BUFFER *Next;
    PMDL CurrentMdl;
    ULONG CurrentMdlOffset, DataLength;
    PMDL MdlChain;
    ULONG DataOffset;
    NDIS_HANDLE NdisPoolHandle;
    PVOID NdisReserved[2], ProtocolReserved[6], MiniportReserved[4];
} NET_BUFFER, *PNET_BUFFER;
typedef enum {
    TcpIpChecksumNetBufferListInfo,
    TcpLargeSendNetBufferListInfo,
    Ieee8021QNetBufferListInfo,
    NetBufferListCancelId,
    NetBufferListProtocolId,
    NetBufferListHashValue,
    NetBufferListHashInfo,
    TcpRecvSegCoalesceInfo,
    UdpSegmentationOffloadInfo,
    MaxNetBufferListInfo,
} NDIS_NET_BUFFER_LIST_INFO;
typedef struct _NET_BUFFER_LIST {
    struct _NET_BUFFER_LIST *Next;
    PNET_BUFFER FirstNetBuffer;
    struct _NET_BUFFER_LIST *ParentNetBufferList;
    NDIS_HANDLE NdisPoolHandle;
    PVOID NdisReserved[2], ProtocolReserved[4], MiniportReserved[2], Scratch;
    NDIS_HANDLE SourceHandle;
    LONG ChildRefCount;
    NDIS_STATUS Status;
    PVOID NetBufferListInfo[MaxNetBufferListInfo];
} NET_BUFFER_LIST, *PNET_BUFFER_LIST;
#define NET_BUFFER_LIST_NEXT_NBL(it) ((it)->Next)
#define NET_BUFFER_LIST_FIRST_NB(it) ((it)->FirstNetBuffer)
#define NET_BUFFER_LIST_STATUS(it) ((it)->Status)
#define NET_BUFFER_LIST_INFO(it, number) ((it)->NetBufferListInfo[number])
#define NET_BUFFER_NEXT_NB(it) ((it)->Next)
#define NET_BUFFER_CURRENT_MDL(it) ((it)->CurrentMdl)
#define NET_BUFFER_CURRENT_MDL_OFFSET(it) ((it)->CurrentMdlOffset)
#define NET_BUFFER_DATA_LENGTH(it) ((it)->DataLength)
#define NET_BUFFER_DATA_OFFSET(it) ((it)->DataOffset)
#define NDIS_MDL_LINKAGE(it) ((it)->Next)
#define NDIS_GET_NET_BUFFER_LIST_CANCEL_ID(it) NET_BUFFER_LIST_INFO(it, NetBufferListCancelId)
#define NET_BUFFER_LIST_GET_HASH_VALUE(it)                                                         \
    ((ULONG)(ULONG_PTR)NET_BUFFER_LIST_INFO(it, NetBufferListHashValue))
#define NET_BUFFER_LIST_SET_HASH_VALUE(it, value)                                                  \
    (NET_BUFFER_LIST_INFO(it, NetBufferListHashValue) = (PVOID)(ULONG_PTR)(value))
#define NDIS_LIST_HASH(it) (*(ULONG *)&NET_BUFFER_LIST_INFO(it, NetBufferListHashInfo))
#define NET_BUFFER_LIST_SET_HASH_TYPE(it, type)                                                    \
    (NDIS_LIST_HASH(it) = (NDIS_LIST_HASH(it) & 0xff) | (type))
#define NET_BUFFER_LIST_SET_HASH_FUNCTION(it, function)                                            \
    (NDIS_LIST_HASH(it) = (NDIS_LIST_HASH(it) & ~0xffu) | (function))
#define NET_BUFFER_LIST_COALESCED_SEG_COUNT(it)                                                    \
    (((USHORT *)&NET_BUFFER_LIST_INFO(it, TcpRecvSegCoalesceInfo))[0])
#define NET_BUFFER_LIST_DUP_ACK_COUNT(it)                                                          \
    (((USHORT *)&NET_BUFFER_LIST_INFO(it, TcpRecvSegCoalesceInfo))[1])
typedef struct {
    NDIS_OBJECT_HEADER Header;
    UCHAR ProtocolId;
    BOOLEAN fAllocateNetBuffer;
    USHORT ContextSize;
    ULONG PoolTag, DataSize;
} NET_BUFFER_LIST_POOL_PARAMETERS;
#define NET_BUFFER_LIST_POOL_PARAMETERS_REVISION_1 1
#define NDIS_SIZEOF_NET_BUFFER_LIST_POOL_PARAMETERS_REVISION_1                                     \
    sizeof(NET_BUFFER_LIST_POOL_PARAMETERS)
#define NDIS_PROTOCOL_ID_IP6 3
#define NDIS_SEND_COMPLETE_FLAGS_DISPATCH_LEVEL 1
#define NDIS_RECEIVE_FLAGS_DISPATCH_LEVEL 1
#define NDIS_RECEIVE_FLAGS_RESOURCES 2
#define NDIS_RETURN_FLAGS_DISPATCH_LEVEL 1
#define NDIS_CLONE_FLAGS_USE_ORIGINAL_MDLS 2
NDIS_HANDLE NdisAllocateNetBufferListPool(NDIS_HANDLE, NET_BUFFER_LIST_POOL_PARAMETERS *);
VOID NdisFreeNetBufferListPool(NDIS_HANDLE);
PNET_BUFFER_LIST NdisAllocateNetBufferAndNetBufferList(NDIS_HANDLE, USHORT, USHORT, PMDL, ULONG,
                                                       SIZE_T);
VOID NdisFreeNetBufferList(PNET_BUFFER_LIST);
PNET_BUFFER_LIST NdisAllocateCloneNetBufferList(PNET_BUFFER_LIST, NDIS_HANDLE, NDIS_HANDLE, ULONG);
VOID NdisFreeCloneNetBufferList(PNET_BUFFER_LIST, ULONG);
PMDL NdisAllocateMdl(NDIS_HANDLE, PVOID, ULONG);
VOID NdisFreeMdl(PMDL);
#define NdisAdjustMdlLength(it, length) ((it)->ByteCount = (length))
#define NdisQueryMdl(it, address, length, priority)                                                \
    (*(address) = (PVOID)(it)->MappedSystemVa, *(length) = (it)->ByteCount)

/* What a list says of its packets. */

typedef union {
    struct {
        ULONG IsIPv4 : 1, IsIPv6 : 1, TcpChecksum : 1, UdpChecksum : 1, IpHeaderChecksum : 1;
        ULONG Reserved : 11, TcpHeaderOffset : 10;
    } Transmit;
    struct {
        ULONG TcpChecksumFailed : 1, UdpChecksumFailed : 1, IpChecksumFailed : 1;
        ULONG TcpChecksumSucceeded : 1, UdpChecksumSucceeded : 1, IpChecksumSucceeded : 1;
        ULONG Loopback : 1, TcpChecksumValueInvalid : 1, IpChecksumValueInvalid : 1;
    } Receive;
    PVOID Value;
} NDIS_TCP_IP_CHECKSUM_NET_BUFFER_LIST_INFO;
typedef union {
    struct {
        ULONG Unused : 30, Type : 1, Reserved : 1;
    } Transmit;
    struct {
        ULONG MSS : 20, TcpHeaderOffset : 10, Type : 1, Reserved : 1;
    } LsoV1Transmit;
    struct {
        ULONG TcpPayload : 30, Type : 1, Reserved : 1;
    } LsoV1TransmitComplete;
    struct {
        ULONG MSS : 20, TcpHeaderOffset : 10, Type : 1, IPVersion : 1;
    } LsoV2Transmit;
    struct {
        ULONG Reserved : 30, Type : 1, Reserved2 : 1;
    } LsoV2TransmitComplete;
    PVOID Value;
} NDIS_TCP_LARGE_SEND_OFFLOAD_NET_BUFFER_LIST_INFO;
#define NDIS_TCP_LARGE_SEND_OFFLOAD_V1_TYPE 0
#define NDIS_TCP_LARGE_SEND_OFFLOAD_V2_TYPE 1
#define NDIS_TCP_LARGE_SEND_OFFLOAD_IPv4 0
#define NDIS_TCP_LARGE_SEND_OFFLOAD_IPv6 1
typedef union {
    struct {
        ULONG MSS : 20, UdpHeaderOffset : 10, Reserved : 1, IPVersion : 1;
    } Transmit;
    PVOID Value;
} NDIS_UDP_SEGMENTATION_OFFLOAD_NET_BUFFER_LIST_INFO;
#define NDIS_UDP_SEGMENTATION_OFFLOAD_IPV4 0
#define NDIS_UDP_SEGMENTATION_OFFLOAD_IPV6 1
typedef union {
    struct {
        ULONG UserPriority : 3, CanonicalFormatId : 1, VlanId : 12;
    } TagHeader;
    PVOID Value;
} NDIS_NET_BUFFER_LIST_8021Q_INFO;

#include "offload.h"
#include "miniport.h"
#include "services.h"

#ifdef __cplusplus
}
#endif
#endif
