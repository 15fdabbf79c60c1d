//! Variables of Windows: its version and setup, the account, the download, and shared folders.

use crate::settings::variable::{Variable, variables};

pub(super) const WINDOWS: &[Variable] = variables! {
    /// The version of Windows, the URL of an installation medium, the name of one on the volume, or
    /// `probe`, a small built-in guest that displays the hardware it finds. A URL may end with
    /// `#sha256=` and the checksum of the file.
    full "VERSION" = "11" (windows.version): Version;
    /// The edition to install from a medium with several.
    full "EDITION" = "" (windows.edition);
    /// How Windows is installed: `setup` (Windows Setup) or `script` (a script in Windows PE that
    /// applies the image with Microsoft's tools, which skips the checks of Windows Setup).
    full "INSTALLER" = "setup" (windows.installer);
    /// The language of Windows, and the default of REGION and KEYBOARD.
    full "LANGUAGE" = "en" (windows.language): Language;
    /// The culture of dates and numbers. Defaults to that of LANGUAGE.
    full "REGION" = "" (windows.region);
    /// The keyboard layout. Defaults to that of LANGUAGE.
    full "KEYBOARD" = "" (windows.keyboard);
    /// The product key.
    full "KEY" = "" (windows.key);
    /// The width of the screen in pixels.
    full "WIDTH" = "1280" (windows.width);
    /// The height of the screen in pixels.
    full "HEIGHT" = "720" (windows.height);
    /// Installs manually: a person answers the questions of Windows Setup at the screen. For
    /// Windows 11, the machine then has Secure Boot and a TPM unless BOOT_MODE is set.
    full "MANUAL" = "N" (windows.manual);
    /// A command that runs at the end of the installation, after /oem/install.bat.
    full "COMMAND" = "" (windows.command);
    /// Keeps the output of install.bat in C:\OEM\install.log.
    full "LOG" = "N" (windows.log);
};

pub(super) const ACCOUNT: &[Variable] = variables! {
    /// The name of the Windows account to create, which is also the user name for the screen. With
    /// DOMAIN, the name of an existing account there, which Windows logs on.
    full "USERNAME" = "Docker" (account.user);
    /// The password of the account, of the built-in Administrator, and of the screen. By default
    /// one is generated, which `transom password` prints. With COMPAT=dockur the account gets
    /// `admin`.
    full "PASSWORD" = "admin" (account.password);
    /// Logs the account on automatically.
    full "AUTOLOGIN" = "Y" (account.autologin);
    /// The Active Directory domain to join. Needs USERNAME and PASSWORD.
    full "DOMAIN" = "" (account.domain);
    /// The organizational unit of the computer in the domain.
    full "DOMAIN_OU" = "" (account.unit);
    /// The workgroup to join.
    full "WORKGROUP" = "" (account.workgroup);
    /// The name of the computer in Windows and on the network. Defaults to a random name in
    /// Windows, and to APP on the network.
    full "HOST" or "VM_NET_HOST" = "" (account.host);
};

pub(super) const MEDIA: &[Variable] = variables! {
    /// Compares downloads with their known checksums.
    ignored "VERIFY" = "N"
        => "downloads are always compared with their known checksums: leave it out";
    /// Deletes the downloaded medium, and downloaded drivers, once Windows is set up.
    /// Files that are mounted, or that have other names, stay.
    full "REMOVE" = "Y" (media.remove);
    /// Downloads the medium from Microsoft if it is not there.
    full "MIDO" = "Y" (media.mido);
    /// Requests the medium from Microsoft's catalog of upgrade images, too, if its page refuses.
    full "ESD" = "Y" (media.esd);
    /// The number of parallel connections of a download.
    full "CONNECTIONS" = "4" (media.connections);
    /// The ISO of virtio-win with Windows' drivers for the disk and the network card: its path, or
    /// a URL, which may end with `#sha256=` and the checksum; `N` downloads none. Defaults to
    /// /drivers.iso, or to drivers.iso or the newest virtio-win*.iso on the volume; without one,
    /// virtio-win 0.1.271 is downloaded.
    full "DRIVERS" = "" (media.drivers): Missing;
    /// The download is an archive that contains the medium.
    ignored "UNPACK" = "N" => "archives are not unpacked: give the URL of the ISO image itself";
    /// The proxy for addresses that begin with https://, as in http://proxy.example:3128.
    full "HTTPS_PROXY" or "https_proxy" = "" (web.https_proxy);
    /// The proxy for addresses that begin with http://.
    full "HTTP_PROXY" or "http_proxy" = "" (web.http_proxy);
    /// Hosts, domains and addresses that are reached without a proxy, comma-separated.
    full "NO_PROXY" or "no_proxy" = "" (web.no_proxy);
    /// A file with root certificates in PEM format, in addition to Mozilla's: for a proxy that
    /// reads TLS.
    full "SSL_CERT_FILE" = "" (web.certificates);
    /// Rebuilds the medium, in old versions.
    ignored "REBUILD" = "N" => "media are never changed here: leave it out";
};

pub(super) const SHARES: &[Variable] = variables! {
    /// Shares the folders /shared, /shared2 and /shared3, if they are mounted, as
    /// `\\host.lan\Data`, `Data2` and `Data3`.
    full "SAMBA" = "Y" (shares.on);
    /// Log messages of the share server.
    ignored "SAMBA_DEBUG" = "N" => "set DEBUG=Y, which logs the share server's messages, too";
    /// Makes the shares read-only.
    full "SAMBA_READONLY" = "N" (shares.read_only);
    /// The path of the share server's configuration.
    ignored "SAMBA_CONFIG" = "" => "the share server is Transom's own, without such a file";
    /// A further network interface of the share server.
    ignored "SAMBA_INTERFACE" = "" => "the shares are for the guest only: leave it out";
    /// A newly installed Windows has the first share as drive Z: and as `Shared` on the desktop.
    full "SHORTCUT" = "Y" (shares.shortcut);
    /// Further folders to share, in old versions.
    ignored "SHARES" = "" => "mount folders as /shared, /shared2 and /shared3 instead";
};
