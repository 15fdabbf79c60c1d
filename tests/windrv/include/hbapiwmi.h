/* WMI classes of storage adapters: the types that vioscsi names. No check uses them. */
#ifndef WINDRV_HBAPIWMI_H
#define WINDRV_HBAPIWMI_H
#define MS_SM_AdapterInformationQueryGuid                                                          \
    {                                                                                              \
        1, 0, 0,                                                                                   \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }
#define MS_SM_PortInformationMethodsGuid                                                           \
    {                                                                                              \
        2, 0, 0,                                                                                   \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }
typedef struct {
    ULONGLONG UniqueAdapterId;
    ULONG HBAStatus, NumberOfPorts, VendorSpecificID;
    WCHAR Manufacturer[65], SerialNumber[65], Model[257], ModelDescription[257],
        HardwareVersion[257], DriverVersion[257], OptionROMVersion[257], FirmwareVersion[257],
        DriverName[257], HBASymbolicName[257], RedundantOptionROMVersion[257],
        RedundantFirmwareVersion[257], MfgDomain[257];
} MS_SM_AdapterInformationQuery, *PMS_SM_AdapterInformationQuery;
typedef struct {
    UCHAR NodeWWN[8], PortWWN[8];
    ULONG FcId, PortSupportedClassofService, NumberofDiscoveredPorts;
    UCHAR NumberofPhys;
    WCHAR PortSymbolicName[257];
} MS_SMHBA_FC_Port, *PMS_SMHBA_FC_Port;
typedef struct {
    ULONG PortType, PortState, PortSpecificAttributesSize;
    WCHAR OSDeviceName[257];
    UCHAR PortSpecificAttributes[];
} MS_SMHBA_PORTATTRIBUTES;
#define METHOD(name, number)                                                                       \
    enum { SM_##name = number };                                                                   \
    typedef struct {                                                                               \
        ULONG Index;                                                                               \
    } SM_##name##_IN, *PSM_##name##_IN;                                                            \
    typedef struct {                                                                               \
        ULONG HBAStatus, PortType;                                                                 \
        LONGLONG PhyCounter[1];                                                                    \
        MS_SMHBA_PORTATTRIBUTES PortAttributes;                                                    \
    } SM_##name##_OUT, *PSM_##name##_OUT;                                                          \
    enum {                                                                                         \
        SM_##name##_IN_SIZE = sizeof(SM_##name##_IN),                                              \
        SM_##name##_OUT_SIZE = sizeof(SM_##name##_OUT)                                             \
    };
METHOD(GetPortType, 1)
METHOD(GetAdapterPortAttributes, 2)
METHOD(GetDiscoveredPortAttributes, 3)
METHOD(GetPortAttributesByWWN, 4)
METHOD(GetProtocolStatistics, 5)
METHOD(GetPhyStatistics, 6)
METHOD(GetFCPhyAttributes, 7)
METHOD(GetSASPhyAttributes, 8)
enum { SM_RefreshInformation = 9 };
#endif
