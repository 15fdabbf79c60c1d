/* Structures of ntddndis.h that have grown with NDIS 6.60 to 6.85: offloads and receive side
 * scaling. Included by ndis.h. */

typedef struct {
    struct {
        ULONG Encapsulation, MaxOffLoadSize;
        ULONG MinSegmentCount : 6, SubMssFinalSegmentSupported : 1, Reserved : 25;
    } IPv4;
    struct {
        ULONG Encapsulation, MaxOffLoadSize;
        ULONG MinSegmentCount : 6, SubMssFinalSegmentSupported : 1;
        ULONG IpExtensionHeadersSupported : 1, Reserved : 24;
    } IPv6;
} NDIS_UDP_SEGMENTATION_OFFLOAD;
typedef struct _NDIS_OFFLOAD {
    NDIS_OBJECT_HEADER Header;
    NDIS_TCP_IP_CHECKSUM_OFFLOAD Checksum;
    NDIS_TCP_LARGE_SEND_OFFLOAD_V1 LsoV1;
    NDIS_IPSEC_OFFLOAD_V1 IPsecV1;
    NDIS_TCP_LARGE_SEND_OFFLOAD_V2 LsoV2;
    ULONG Flags;
    NDIS_IPSEC_OFFLOAD_V2 IPsecV2;
    NDIS_TCP_RECV_SEG_COALESCE_OFFLOAD Rsc;
    NDIS_ENCAPSULATED_PACKET_TASK_OFFLOAD EncapsulatedPacketTaskOffloadGre;
    NDIS_UDP_SEGMENTATION_OFFLOAD UdpSegmentation;
} NDIS_OFFLOAD, *PNDIS_OFFLOAD;
#define NDIS_OFFLOAD_REVISION_6 6
#define NDIS_OFFLOAD_REVISION_7 7
#define NDIS_SIZEOF_NDIS_OFFLOAD_REVISION_6 RTL_SIZEOF_THROUGH_FIELD(NDIS_OFFLOAD, UdpSegmentation)
#define NDIS_SIZEOF_NDIS_OFFLOAD_REVISION_7 NDIS_SIZEOF_NDIS_OFFLOAD_REVISION_6

typedef struct _NDIS_OFFLOAD_PARAMETERS {
    NDIS_OBJECT_HEADER Header;
    UCHAR IPv4Checksum, TCPIPv4Checksum, UDPIPv4Checksum, TCPIPv6Checksum, UDPIPv6Checksum;
    UCHAR LsoV1, IPsecV1, LsoV2IPv4, LsoV2IPv6, TcpConnectionIPv4, TcpConnectionIPv6;
    ULONG Flags;
    UCHAR IPsecV2, IPsecV2IPv4, RscIPv4, RscIPv6;
    UCHAR EncapsulatedPacketTaskOffload, EncapsulationTypes;
    struct {
        UCHAR IPv4, IPv6;
    } UdpSegmentation;
} NDIS_OFFLOAD_PARAMETERS, *PNDIS_OFFLOAD_PARAMETERS;
#define NDIS_OFFLOAD_PARAMETERS_REVISION_5 5
#define NDIS_SIZEOF_OFFLOAD_PARAMETERS_REVISION_5                                                  \
    RTL_SIZEOF_THROUGH_FIELD(NDIS_OFFLOAD_PARAMETERS, UdpSegmentation)
#define NDIS_OFFLOAD_PARAMETERS_USO_DISABLED 1
#define NDIS_OFFLOAD_PARAMETERS_USO_ENABLED 2

typedef struct {
    NDIS_OBJECT_HEADER Header;
    struct {
        ULONG Enabled, EncapsulationType, HeaderSize;
    } IPv4, IPv6;
} NDIS_OFFLOAD_ENCAPSULATION, *PNDIS_OFFLOAD_ENCAPSULATION;
#define NDIS_OFFLOAD_ENCAPSULATION_REVISION_1 1
#define NDIS_SIZEOF_OFFLOAD_ENCAPSULATION_REVISION_1 sizeof(NDIS_OFFLOAD_ENCAPSULATION)

typedef struct _NDIS_RECEIVE_SCALE_PARAMETERS {
    NDIS_OBJECT_HEADER Header;
    USHORT Flags, BaseCpuNumber;
    ULONG HashInformation;
    USHORT IndirectionTableSize;
    ULONG IndirectionTableOffset;
    USHORT HashSecretKeySize;
    ULONG HashSecretKeyOffset;
    ULONG ProcessorMasksOffset, NumberOfProcessorMasks, ProcessorMasksEntrySize;
    PROCESSOR_NUMBER DefaultProcessorNumber;
} NDIS_RECEIVE_SCALE_PARAMETERS, *PNDIS_RECEIVE_SCALE_PARAMETERS;
#define NDIS_RECEIVE_SCALE_PARAMETERS_REVISION_3 3
#define NDIS_SIZEOF_RECEIVE_SCALE_PARAMETERS_REVISION_3                                            \
    RTL_SIZEOF_THROUGH_FIELD(NDIS_RECEIVE_SCALE_PARAMETERS, DefaultProcessorNumber)
#define NDIS_RSS_PARAM_FLAG_DEFAULT_PROCESSOR_UNCHANGED 0x20
#define NDIS_RECEIVE_SCALE_CAPABILITIES_REVISION_3 3
#define NDIS_SIZEOF_RECEIVE_SCALE_CAPABILITIES_REVISION_3                                          \
    NDIS_SIZEOF_RECEIVE_SCALE_CAPABILITIES_REVISION_2
#define NDIS_HASH_UDP_IPV4 0x00004000
#define NDIS_HASH_UDP_IPV6 0x00008000
#define NDIS_HASH_UDP_IPV6_EX 0x00010000
#define NDIS_RSS_CAPS_HASH_TYPE_UDP_IPV4 0x00001000
#define NDIS_RSS_CAPS_HASH_TYPE_UDP_IPV6 0x00002000
#define NDIS_RSS_CAPS_HASH_TYPE_UDP_IPV6_EX 0x00004000
