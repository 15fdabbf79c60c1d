/* The HBA API (SNIA): the values that vioscsi names in its answers to WMI. */
#define HBA_STATUS_OK 0
#define HBA_PORTTYPE_SASDEVICE 30
#define HBA_PORTSTATE_ONLINE 2
