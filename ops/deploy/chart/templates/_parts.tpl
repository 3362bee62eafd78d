{{/* What the three shapes share: names, and the store's container. */}}

{{- define "kvstore.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvstore.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvstore.labels" -}}
{{ include "kvstore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvstore.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Seconds from SIGTERM to the end: up to 10 for calls under way, and as many for the last syncs on a slow disk. */}}
{{- define "kvstore.stopSeconds" -}}
20
{{- end }}

{{- define "kvstore.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.user }}
fsGroup: {{ .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvstore.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Each secret that is mounted, at /etc/kvstore/NAME. */}}
{{- define "kvstore.secrets" -}}
{{- with .Values }}
{{- if eq .mode "central" }}
{{- if not (or .tokens.secret .tls.clientCaSecret .tenants.secret) }}
{{- fail "tokens.secret is empty: set it, or tls.clientCaSecret, or tenants.secret with tokens in it: something must let callers in" }}
{{- end }}
- {name: tls, secret: {{ .tls.secret }}}
{{- with .tokens.secret }}
- {name: tokens, secret: {{ . }}}
{{- end }}
{{- with .tls.clientCaSecret }}
- {name: client-ca, secret: {{ . }}}
{{- end }}
{{- with .admin.secret }}
- {name: admin, secret: {{ . }}}
{{- end }}
{{- end }}
{{- with .tenants.secret }}
- {name: tenants, secret: {{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{/* As volumes: root's, and readable by the service's group alone, since it refuses a file of tokens that others may read. */}}
{{- define "kvstore.secretVolumes" -}}
{{- range fromYamlArray (include "kvstore.secrets" .) }}
- name: {{ .name }}
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* A list item for `containers` or `initContainers`; .more is put in front of the rest, .mounts behind the two. */}}
{{- define "kvstore.container" -}}
{{- $root := .root }}
{{- with $root.Values }}
- name: kvstore
  image: {{ include "kvstore.image" $root }}
  imagePullPolicy: {{ .image.pullPolicy }}
  {{- if $.restartPolicy }}
  # A native sidecar: it is ready before the engine starts, and gets SIGTERM when the engine has ended. It has no preStop:
  # that would run while the engine still stores.
  restartPolicy: {{ $.restartPolicy }}
  {{- end }}
  args:
    - serve
    - --dir=/var/lib/kvstore/store
    - --sockets=/run/kvstore/sockets
    - --disk={{ .disk.size }}
    - --memory={{ .memory.storeMiB }}MiB
    - --retention={{ .retention }}
    - --policy={{ .policy }}
    - --metrics=0.0.0.0:{{ .ports.metrics }}
    - --health=0.0.0.0:{{ .ports.health }}
    - --log-format={{ .logFormat }}
    {{- if eq .mode "central" }}
    - --listen=0.0.0.0:{{ .ports.grpc }}
    - --tls-cert=/etc/kvstore/tls/tls.crt
    - --tls-key=/etc/kvstore/tls/tls.key
    {{- if .tokens.secret }}
    - --token-file=/etc/kvstore/tokens/tokens
    {{- end }}
    {{- if .tls.clientCaSecret }}
    - --tls-client-ca=/etc/kvstore/client-ca/ca.crt
    {{- end }}
    {{- if .admin.secret }}
    - --admin-token-file=/etc/kvstore/admin/tokens
    {{- end }}
    {{- end }}
    {{- if .tenants.secret }}
    - --tenants=/etc/kvstore/tenants/tenants.toml
    {{- end }}
    {{- if .events.port }}
    - --events=tcp://0.0.0.0:{{ .events.port }}
    {{- if .events.replayPort }}
    - --events-replay=tcp://0.0.0.0:{{ .events.replayPort }}
    {{- end }}
    - --unsafe-public-events=yes
    {{- end }}
    {{- range $name, $value := .options }}
    - --{{ $name }}={{ $value }}
    {{- end }}
  ports:
    {{- if eq .mode "central" }}
    - {name: grpc, containerPort: {{ .ports.grpc }}}
    {{- end }}
    - {name: metrics, containerPort: {{ .ports.metrics }}}
    - {name: health, containerPort: {{ .ports.health }}}
    {{- if .events.port }}
    - {name: events, containerPort: {{ .events.port }}}
    {{- if .events.replayPort }}
    - {name: events-replay, containerPort: {{ .events.replayPort }}}
    {{- end }}
    {{- end }}
  startupProbe:
    grpc: {port: {{ .ports.health }}}
    periodSeconds: 2
    failureThreshold: {{ div .startSeconds 2 }}
  readinessProbe:
    grpc: {port: {{ .ports.health }}}
    periodSeconds: 5
  # Health under this name says SERVING also while the service drains: it is not to be killed for that.
  livenessProbe:
    grpc: {port: {{ .ports.health }}, service: liveness}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  {{- if not $.restartPolicy }}
  lifecycle:
    preStop:
      exec:
        command: [kvstore, drain, --dir=/run/kvstore/sockets, --timeout={{ .drainSeconds }}s]
  {{- end }}
  resources:
    requests:
      cpu: {{ .cpu.request | quote }}
      memory: {{ add .memory.storeMiB .memory.indexMiB .memory.processMiB }}Mi
    limits:
      {{- if .cpu.limit }}
      cpu: {{ .cpu.limit | quote }}
      {{- end }}
      # Block cache and arenas are shared memory of this container, and in --memory; they are not in /dev/shm.
      memory: {{ add .memory.storeMiB .memory.indexMiB .memory.processMiB }}Mi
  securityContext:
    {{- include "kvstore.containerSecurity" $root | nindent 4 }}
  volumeMounts:
    - {name: data, mountPath: /var/lib/kvstore}
    - {name: sockets, mountPath: /run/kvstore}
    {{- range fromYamlArray (include "kvstore.secrets" $root) }}
    - {name: {{ .name }}, mountPath: /etc/kvstore/{{ .name }}, readOnly: true}
    {{- end }}
    {{- range $.mounts }}
    - {{ . | toJson }}
    {{- end }}
{{- end }}
{{- end }}

{{- define "kvstore.claim" -}}
accessModes: [ReadWriteOnce]
{{- if .Values.disk.storageClass }}
storageClassName: {{ .Values.disk.storageClass }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.disk.volume }}
{{- end }}

{{- define "kvstore.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}
