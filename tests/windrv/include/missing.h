/* Names of Windows' SCSI headers that the drivers use and that mingw-w64's headers lack. */
#ifndef WINDRV_MISSING_H
#define WINDRV_MISSING_H

#define POINTER_ALIGN _Alignas(8)
#define SCSI_SENSE_ERRORCODE_FIXED_CURRENT 0x70
#define SCSI_SENSEQ_SPACE_ALLOC_FAILED_WRITE_PROTECT 0x07
#define SCSI_SENSEQ_CAPACITY_DATA_CHANGED 0x09
#define VPD_BLOCK_LIMITS 0xB0
#define VPD_BLOCK_DEVICE_CHARACTERISTICS 0xB1
#define VPD_LOGICAL_BLOCK_PROVISIONING 0xB2
#define PROVISIONING_TYPE_RESOURCE 1
#define PROVISIONING_TYPE_THIN 2

typedef struct _VPD_BLOCK_LIMITS_PAGE {
    UCHAR DeviceType : 5, DeviceTypeQualifier : 3, PageCode, PageLength[2];
    UCHAR Reserved0, MaximumCompareAndWriteLength, OptimalTransferLengthGranularity[2],
        MaximumTransferLength[4], OptimalTransferLength[4],
        MaxPrefetchXDReadXDWriteTransferLength[4], MaximumUnmapLBACount[4],
        MaximumUnmapBlockDescriptorCount[4], OptimalUnmapGranularity[4];
    union {
        struct {
            UCHAR UnmapGranularityAlignmentByte3 : 7, UGAValid : 1;
        };
        UCHAR UnmapGranularityAlignment[4];
    };
    UCHAR Reserved1[28];
} VPD_BLOCK_LIMITS_PAGE, *PVPD_BLOCK_LIMITS_PAGE;
typedef struct _VPD_BLOCK_DEVICE_CHARACTERISTICS_PAGE {
    UCHAR DeviceType : 5, DeviceTypeQualifier : 3, PageCode, Reserved0, PageLength,
        MediumRotationRateMsb, MediumRotationRateLsb, MediumProductType, NominalFormFactor : 4,
        Reserved2 : 4, Reserved3[56];
} VPD_BLOCK_DEVICE_CHARACTERISTICS_PAGE, *PVPD_BLOCK_DEVICE_CHARACTERISTICS_PAGE;
typedef struct _VPD_LOGICAL_BLOCK_PROVISIONING_PAGE {
    UCHAR DeviceType : 5, DeviceTypeQualifier : 3, PageCode, PageLength[2], ThresholdExponent;
    UCHAR DP : 1, ANC_SUP : 1, LBPRZ : 1, Reserved0 : 2, LBPWS10 : 1, LBPWS : 1, LBPU : 1;
    UCHAR ProvisioningType : 3, Reserved1 : 5, Reserved2;
} VPD_LOGICAL_BLOCK_PROVISIONING_PAGE, *PVPD_LOGICAL_BLOCK_PROVISIONING_PAGE;

typedef struct _UNMAP_BLOCK_DESCRIPTOR {
    UCHAR StartingLba[8], LbaCount[4], Reserved[4];
} UNMAP_BLOCK_DESCRIPTOR, *PUNMAP_BLOCK_DESCRIPTOR;
typedef struct _UNMAP_LIST_HEADER {
    UCHAR DataLength[2], BlockDescrDataLength[2], Reserved[4];
    UNMAP_BLOCK_DESCRIPTOR Descriptors[];
} UNMAP_LIST_HEADER, *PUNMAP_LIST_HEADER;

typedef struct _READ_CAPACITY16_DATA {
    LARGE_INTEGER LogicalBlockAddress;
    ULONG BytesPerBlock;
    UCHAR ProtectionEnable : 1, ProtectionType : 3, RcBasis : 4;
    UCHAR LogicalPerPhysicalExponent : 4, ProtectionInfoExponent : 4;
    UCHAR LowestAlignedBlock_MSB : 6, LBPRZ : 1, LBPME : 1, LowestAlignedBlock_LSB;
    UCHAR Reserved3[16];
} READ_CAPACITY16_DATA, *PREAD_CAPACITY16_DATA;

#define IOCTL_SCSI_MINIPORT_NOT_QUORUM_CAPABLE ((FILE_DEVICE_SCSI << 16) + 0x0520)
#define IOCTL_SCSI_MINIPORT_FIRMWARE ((FILE_DEVICE_SCSI << 16) + 0x0780)
#define FIRMWARE_FUNCTION_GET_INFO 1
#define FIRMWARE_FUNCTION_DOWNLOAD 2
#define FIRMWARE_FUNCTION_ACTIVATE 3
#define FIRMWARE_STATUS_SUCCESS 0
#define FIRMWARE_STATUS_INVALID_PARAMETER 4
#define FIRMWARE_STATUS_OUTPUT_BUFFER_TOO_SMALL 6
#define STORAGE_FIRMWARE_INFO_STRUCTURE_VERSION_V2 2
#define STORAGE_FIRMWARE_DOWNLOAD_STRUCTURE_VERSION_V2 2
#define STORAGE_FIRMWARE_ACTIVATE_STRUCTURE_VERSION 1
#define STORAGE_FIRMWARE_INFO_INVALID_SLOT 0xFF
typedef struct _FIRMWARE_REQUEST_BLOCK {
    ULONG Version, Size, Function, Flags, DataBufferOffset, DataBufferLength;
} FIRMWARE_REQUEST_BLOCK, *PFIRMWARE_REQUEST_BLOCK;
typedef struct _STORAGE_FIRMWARE_SLOT_INFO_V2 {
    UCHAR SlotNumber;
    BOOLEAN ReadOnly;
    UCHAR Reserved[6], Revision[16];
} STORAGE_FIRMWARE_SLOT_INFO_V2;
typedef struct _STORAGE_FIRMWARE_INFO_V2 {
    ULONG Version, Size;
    BOOLEAN UpgradeSupport;
    UCHAR SlotCount, ActiveSlot, PendingActivateSlot;
    BOOLEAN FirmwareShared;
    UCHAR Reserved[3];
    ULONG ImagePayloadAlignment, ImagePayloadMaxSize;
    STORAGE_FIRMWARE_SLOT_INFO_V2 Slot[];
} STORAGE_FIRMWARE_INFO_V2, *PSTORAGE_FIRMWARE_INFO_V2;
typedef struct _STORAGE_FIRMWARE_DOWNLOAD_V2 {
    ULONG Version, Size;
} STORAGE_FIRMWARE_DOWNLOAD_V2, *PSTORAGE_FIRMWARE_DOWNLOAD_V2;
typedef struct _STORAGE_FIRMWARE_ACTIVATE {
    ULONG Version, Size;
} STORAGE_FIRMWARE_ACTIVATE, *PSTORAGE_FIRMWARE_ACTIVATE;

/* Prints the drivers' debug messages of levels 0 to 2. */
void windrv_debug(int level, const char *format, ...);
#endif
